"""Who is on this worker: all generations, their place (running or waiting) and their blocks. The one place where a
sequence changes state.
"""

from __future__ import annotations

from bisect import insort

from workers.generation import Generation
from workers.kv.ledger import LedgerDrift, Reason
from workers.kv.pool import BlockPool
from workers.kv.tables import BlockTables
from workers.model.interface import SequenceSlice
from workers.scheduler.pace import next_due_s
from workers.scheduler.sequence import Sequence, SequenceKey
from workers.scheduler.state import Limits, SchedulerState, StepPlan, Work

UNSTARTED_AFTER = 2
"""Iterations that bound work may wait for its start before it is offered back (DESIGN section 4)."""


class Roster:
    """Owned by the engine's thread. `state` is what policies read; it and the block tables always agree."""

    def __init__(self, limits: Limits) -> None:
        self.tables = BlockTables(BlockPool(limits.total_blocks), limits.block_size)
        self.state = SchedulerState(limits, free_blocks=limits.total_blocks)
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

    def unstarted(self, iteration: int, held: frozenset[SequenceKey] = frozenset()) -> tuple[tuple[str, int], ...]:
        """(request id, epoch) of those that came `UNSTARTED_AFTER` iterations ago or more and of which nothing has run
        here: another worker with room would serve them sooner. Not of those that the policy has `held` on purpose."""
        if not self.state.waiting:
            return ()
        late = [s.key for s in self.state.waiting if iteration - s.arrived_iteration >= UNSTARTED_AFTER]
        old = {key.request_id for key in late if key not in held}
        requests = [self.of_request(request_id) for request_id in sorted(old)]
        cold = [choices for choices in requests if all(c.sequence.advanced_iteration == 0 for c in choices)]
        return tuple((choices[0].bound.request.id, choices[0].bound.epoch) for choices in cold)

    def remove(self, generation: Generation, reason: Reason) -> None:
        """It has ended, whatever the reason: its blocks go back, nothing of it stays."""
        sequence = generation.sequence
        if sequence in self.state.running:
            self.state.running.remove(sequence)
        else:
            self.state.waiting.remove(sequence)
        self._give_back(sequence, reason)
        self.state.batch.members.discard(sequence.key)
        choices = self._generations[sequence.key.request_id]
        del choices[sequence.key.choice]
        if not choices:
            del self._generations[sequence.key.request_id]
        if not self._generations and self.tables.pool.ledger.held_blocks:
            raise LedgerDrift(f"nobody is left and {self.tables.pool.ledger.held_blocks} blocks are still held")

    def apply(self, plan: StepPlan, iteration: int, now: float) -> None:
        """Moves preempted and admitted sequences and takes the blocks that the plan has counted. `unfit` ones are the
        engine's to end, before this.
        """
        for key in plan.preempted:
            self._preempt(self[key].sequence, now)
        for key in plan.admitted:
            self._start(self[key].sequence, now)
        if plan.slots:
            self.state.batch.slots = plan.slots
            self.state.batch.members.update(plan.admitted)
        for work in plan.work:
            sequence = self[work.key].sequence
            if sequence.known > sequence.held_blocks * self.tables.block_size:
                self._take(sequence, Reason.GROW)
            sequence.advanced_iteration = iteration

    def sampled(self, sequence: Sequence, now: float) -> None:
        """It got its next token and runs on."""
        if self.state.itl_s is not None:
            sequence.due_s = next_due_s(sequence.due_s, now, self.state.itl_s)

    def slice_for(self, work: Work) -> SequenceSlice:
        return self[work.key].slice_for(work, self.tables.block_ids(work.key))

    def resume(self, now: float) -> None:
        """After a pause nobody is late."""
        for sequence in self.state.running:
            sequence.advanced_s = now

    def check(self) -> None:
        """Raises LedgerDrift unless blocks, tables and sequences agree. O(blocks): for tests and idle moments."""
        self.tables.check()
        for sequence in (*self.state.running, *self.state.waiting):
            if len(self.tables.block_ids(sequence.key)) != sequence.held_blocks:
                raise LedgerDrift(f"{sequence.key} believes it holds {sequence.held_blocks} blocks")

    def _start(self, sequence: Sequence, now: float) -> None:
        self.state.waiting.remove(sequence)
        for other in self.state.waiting:
            if other.place > sequence.place:
                break
            other.overtaken += 1
        self.state.running.append(sequence)
        sequence.advanced_s = now
        self._take(sequence, Reason.ADMIT)

    def _preempt(self, sequence: Sequence, now: float) -> None:
        self.state.running.remove(sequence)
        self._give_back(sequence, Reason.PREEMPT)
        sequence.computed = 0
        sequence.preempted_in_a_row += 1
        sequence.advanced_s = now
        insort(self.state.waiting, sequence, key=_place)
        self.state.capacity.preempted()

    def _take(self, sequence: Sequence, reason: Reason) -> None:
        sequence.held_blocks = self.tables.grow(sequence.key, sequence.known, reason)
        self.state.free_blocks = self.tables.pool.free_blocks

    def _give_back(self, sequence: Sequence, reason: Reason) -> None:
        self.tables.drop(sequence.key, reason)
        sequence.held_blocks = 0
        self.state.free_blocks = self.tables.pool.free_blocks


def _place(sequence: Sequence) -> tuple[float, int]:
    return sequence.place
