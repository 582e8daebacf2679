"""Who is on this worker: all generations, their place (running or waiting) and their blocks. The one place where a
sequence changes state.
"""

from __future__ import annotations

from bisect import insort

from workers.generation import Generation
from workers.holdings import Holdings, Reuse
from workers.kv.ledger import LedgerDrift, Reason
from workers.model.interface import SequenceSlice
from workers.scheduler.pace import next_due_s
from workers.scheduler.room import Hit
from workers.scheduler.sequence import Sequence, SequenceKey
from workers.scheduler.state import Limits, SchedulerState, StepPlan, Work
from workers.scheduler.waits import WaitAccount

UNSTARTED_AFTER = 2
"""Iterations that bound work may wait for its start before it is offered back (DESIGN section 4)."""


class Roster:
    """Owned by the engine's thread. `state` is what policies read; it and the holdings always agree. To a policy it is
    the `Books` of the blocks.
    """

    def __init__(self, limits: Limits, reuse: Reuse) -> None:
        self.holdings = Holdings(limits, reuse)
        self.state = SchedulerState(limits, free_blocks=limits.total_blocks, books=self)
        self.waits = WaitAccount()
        self._generations: dict[str, dict[int, Generation]] = {}
        """By request id, the choices that have not ended."""

    def __len__(self) -> int:
        return len(self.state.running) + len(self.state.waiting)

    def __getitem__(self, key: SequenceKey) -> Generation:
        return self._generations[key.request_id][key.choice]

    def get(self, key: SequenceKey) -> Generation | None:
        """None when it has ended."""
        return self._generations.get(key.request_id, {}).get(key.choice)

    def of_request(self, request_id: str) -> tuple[Generation, ...]:
        """Its choices that have not ended; none for an unknown request."""
        return tuple(self._generations.get(request_id, {}).values())

    def request_ids(self) -> tuple[str, ...]:
        return tuple(self._generations)

    def add(self, generation: Generation, iteration: int = 0) -> None:
        """A new one waits at its place."""
        generation.sequence.arrived_iteration = iteration
        key = generation.sequence.key
        self._generations.setdefault(key.request_id, {})[key.choice] = generation
        insort(self.state.waiting, generation.sequence, key=_place)
        self.waits.arrived(key, generation.sequence.advanced_s)
        self.holdings.begin(generation)

    def hit_of(self, sequence: Sequence) -> Hit:
        """What a waiting sequence would find computed if it started now."""
        return self.holdings.hit_of(self[sequence.key], self.of_request(sequence.key.request_id))

    def shared_ids(self, key: SequenceKey) -> tuple[int, ...]:
        return self.holdings.shared_ids(key)

    def references(self, block_id: int) -> int:
        return self.holdings.tables.pool.references(block_id)

    def unstarted(self, iteration: int, held: frozenset[SequenceKey] = frozenset()) -> tuple[tuple[str, int], ...]:
        """(request id, epoch) of those that came `UNSTARTED_AFTER` iterations ago or more and of which nothing has run
        here: another worker with room would serve them sooner. Not of those that the policy has `held` on
        purpose, nor of those whose prefix is being computed here."""
        if not self.state.waiting:
            return ()
        late = [s for s in self.state.waiting if iteration - s.arrived_iteration >= UNSTARTED_AFTER]
        old = {s.key.request_id for s in late if s.key not in held and not self.holdings.awaits_its_prefix(self[s.key])}
        requests = [self.of_request(request_id) for request_id in sorted(old)]
        cold = [choices for choices in requests if all(c.sequence.advanced_iteration == 0 for c in choices)]
        return tuple((choices[0].bound.request.id, choices[0].bound.epoch) for choices in cold)

    def remove(self, generation: Generation, reason: Reason, now: float) -> None:
        """It has ended, whatever the reason: its blocks go back, nothing of it stays."""
        sequence = generation.sequence
        if sequence in self.state.running:
            self.state.running.remove(sequence)
        else:
            self.state.waiting.remove(sequence)
        self.holdings.end(generation, reason)
        self._count()
        self.state.batch.members.discard(sequence.key)
        self.waits.ended(sequence.key, now)
        choices = self._generations[sequence.key.request_id]
        del choices[sequence.key.choice]
        if not choices:
            del self._generations[sequence.key.request_id]
        held_blocks = self.holdings.tables.pool.ledger.held_blocks
        if not self._generations and held_blocks:
            raise LedgerDrift(f"nobody is left and {held_blocks} blocks are still held")

    def apply(self, plan: StepPlan, iteration: int, now: float) -> None:
        """Moves preempted and admitted sequences and takes the blocks that the plan has counted. `unfit` ones are the
        engine's to end, before this. All hits are pinned before any block is allocated, so that no allocation takes
        what another sequence of the same step has found; and they are looked up before anything changes, as the plan
        has seen them.
        """
        hits = [(self[key], self.hit_of(self[key].sequence)) for key in plan.admitted]
        self.holdings.new_step(self.state.step_time.recompute_s(self.state.limits.block_size))
        for key in plan.preempted:
            self._preempt(self[key], now)
        for generation, hit in hits:
            self.holdings.adopt(generation, hit)
        for generation, hit in hits:
            self._start(generation, hit, now)
        self.waits.planned(plan, now)
        if plan.slots:
            self.state.batch.slots = plan.slots
            self.state.batch.members.update(plan.admitted)
        for work in plan.work:
            generation = self[work.key]
            sequence = generation.sequence
            if sequence.computed != work.start:
                raise LedgerDrift(f"{work.key} has {sequence.computed} tokens computed, the plan says {work.start}")
            if sequence.known > sequence.held_blocks * self.state.limits.block_size:
                self.holdings.grow(generation, Reason.GROW)
            sequence.advanced_iteration = iteration
        self._count()

    def sampled(self, sequence: Sequence, now: float) -> None:
        """It got its next token and runs on."""
        if self.state.itl_s is not None:
            sequence.due_s = next_due_s(sequence.due_s, now, self.state.itl_s)

    def slice_for(self, work: Work) -> SequenceSlice:
        return self[work.key].slice_for(work, self.holdings.tables.block_ids(work.key))

    def resume(self, now: float) -> None:
        """After a pause nobody is late."""
        for sequence in self.state.running:
            sequence.advanced_s = now

    def check(self) -> None:
        """Raises LedgerDrift unless blocks, tables and sequences agree. O(blocks): for tests and idle moments."""
        self.holdings.check()
        for sequence in (*self.state.running, *self.state.waiting):
            if len(self.holdings.tables.block_ids(sequence.key)) != sequence.held_blocks:
                raise LedgerDrift(f"{sequence.key} believes it holds {sequence.held_blocks} blocks")
        if self.state.unowned_blocks() < 0:
            raise LedgerDrift(f"running sequences own {-self.state.unowned_blocks()} blocks more than are held")

    def _start(self, generation: Generation, hit: Hit, now: float) -> None:
        sequence = generation.sequence
        self.state.waiting.remove(sequence)
        for other in self.state.waiting:
            if other.place > sequence.place:
                break
            other.overtaken += 1
        self.state.running.append(sequence)
        sequence.advanced_s = now
        self.holdings.start(generation, hit)

    def _preempt(self, generation: Generation, now: float) -> None:
        sequence = generation.sequence
        self.state.running.remove(sequence)
        self.holdings.release(generation, Reason.PREEMPT)
        sequence.computed = 0
        sequence.preempted_in_a_row += 1
        sequence.advanced_s = now
        insort(self.state.waiting, sequence, key=_place)
        self.state.capacity.preempted()

    def _count(self) -> None:
        self.state.free_blocks = self.holdings.allocatable_blocks


def _place(sequence: Sequence) -> tuple[float, int]:
    return sequence.place
