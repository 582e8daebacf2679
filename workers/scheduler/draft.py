"""A step plan in the making: the passes that every policy composes.

All of it is counting. The draft keeps its own numbers of free blocks, tokens left and survivors; state and sequences
are only read.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from functools import cached_property

from workers.scheduler.peak import Growth, earliest_start, peak_blocks, survivors
from workers.scheduler.sequence import Sequence, SequenceKey
from workers.scheduler.state import SchedulerState, StepPlan, Unfit, Wait, Work, count_reasons

MAX_OVERTAKES = 32
"""A blocked sequence is passed by at most so many later ones, whatever the estimates promise."""
LOOK_AHEAD = 32
"""How many waiting sequences behind a blocked one are considered in one step."""

Share = Callable[[int, "Draft"], int]
"""How many of a gap's tokens a policy computes now: (gap, draft) → 0 … gap."""


class Draft:
    def __init__(self, state: SchedulerState) -> None:
        self.state = state
        self.tokens_left = state.limits.chunk_tokens
        self.prefills = 0
        """Gaps of more than one token in this step so far."""
        self._free_blocks = state.free_blocks
        self._alive = list(state.running)
        self._gone: set[SequenceKey] = set()
        self._work: dict[SequenceKey, Work] = {}
        self._admitted: list[SequenceKey] = []
        self._preempted: list[Sequence] = []
        self._unfit: list[Unfit] = []
        self._reasons: dict[SequenceKey, Wait] = {}

    def advance_decodes(self) -> None:
        """Every running sequence with one token to compute gets it; blocks that run out are taken from victims."""
        decodes = [sequence for sequence in self._alive if sequence.gap == 1]
        if len(decodes) > self.tokens_left:
            decodes.sort(key=lambda sequence: (sequence.advanced_iteration, sequence.rank))
        for sequence in decodes:
            if self.tokens_left == 0:
                break
            if self._is_alive(sequence) and self._make_room(sequence):
                self._compute(sequence, 1)

    def advance_prefills(self, share: Share) -> None:
        """Running sequences with a longer gap go on, first come first. Their blocks were all taken when they were
        admitted.
        """
        for sequence in sorted(self._alive, key=lambda sequence: sequence.rank):
            if sequence.gap > 1:
                count = share(sequence.gap, self) if self._is_alive(sequence) else 0
                if count and self._make_room(sequence):
                    self._compute(sequence, count)

    def admit_waiting(self, share: Share) -> None:
        """Starts waiting sequences in rank order. The first that blocks cannot take reserves its place: a later one
        may pass only if by the estimates that does not delay it, and only MAX_OVERTAKES of them.
        """
        if self._preempted:  # what was just pushed out must not compete with what pushed it
            self._blame(self.state.waiting, Wait.BLOCKS)
            return
        blocked: Sequence | None = None
        passed = 0
        for place, sequence in enumerate(self.state.waiting):
            stop = self._why_stop(sequence, share)
            if stop is None and blocked is not None:
                worn_out = place > LOOK_AHEAD or blocked.overtaken + passed >= MAX_OVERTAKES
                stop = Wait.BLOCKS if worn_out else None
            if stop is not None:
                self._blame(self.state.waiting[place:], stop)
                return
            if self._cannot_ever_fit(sequence):
                continue
            newcomer = self.state.growth_of(sequence)
            if self._fits(sequence, newcomer) and (blocked is None or self._may_pass(blocked, newcomer)):
                insort(self._ahead, newcomer)
                passed += blocked is not None
                self._admit(sequence, share(sequence.gap, self))
            else:
                blocked = blocked or sequence
                self._reasons[sequence.key] = Wait.BLOCKS

    def finished(self) -> StepPlan:
        self._blame(self._preempted, Wait.BLOCKS)
        return StepPlan(
            work=tuple(self._work.values()),
            admitted=tuple(self._admitted),
            preempted=tuple(sequence.key for sequence in self._preempted),
            unfit=tuple(self._unfit),
            waiting_by_reason=count_reasons(self._reasons),
        )

    # -- one sequence ------------------------------------------------------------------------------------------------

    def _compute(self, sequence: Sequence, count: int) -> None:
        self._work[sequence.key] = Work(sequence.key, sequence.computed, count)
        self.tokens_left = max(0, self.tokens_left - count)
        self.prefills += sequence.gap > 1

    def _admit(self, sequence: Sequence, count: int) -> None:
        self._free_blocks -= self.state.limits.blocks(sequence.known)
        self._alive.append(sequence)
        self._admitted.append(sequence.key)
        self._compute(sequence, count)

    def _is_alive(self, sequence: Sequence) -> bool:
        return sequence.key not in self._gone

    def _leave(self, sequence: Sequence) -> None:
        self._alive.remove(sequence)
        self._gone.add(sequence.key)

    # -- blocks ------------------------------------------------------------------------------------------------------

    def _make_room(self, sequence: Sequence) -> bool:
        """Books the blocks the sequence lacks, preempting others (or itself) for them. False when it has to sit this
        step out.
        """
        missing = self.state.limits.blocks(sequence.known) - sequence.held_blocks
        while missing > self._free_blocks:
            if len(self._alive) == 1:  # the last survivor is never preempted: there is nobody to wait for
                self._give_up(sequence)
                return False
            victim = self._choose_victim()
            self._preempt(victim)
            if victim is sequence:
                return False
        self._free_blocks -= max(0, missing)
        return True

    def _choose_victim(self) -> Sequence:
        """Lowest band first, then the fewest tokens to recompute per block freed, then the latest arrival."""
        return min(
            (sequence for sequence in self._alive if sequence.held_blocks),
            key=lambda sequence: (-sequence.band, sequence.computed / sequence.held_blocks, -sequence.rank),
        )

    def _preempt(self, victim: Sequence) -> None:
        self._leave(victim)
        self._preempted.append(victim)
        self._free_blocks += self.state.limits.blocks(victim.known) if victim.key in self._work else victim.held_blocks
        refund = self._work.pop(victim.key, None)
        if refund is not None:
            self.tokens_left += refund.count

    def _give_up(self, sequence: Sequence) -> None:
        self._leave(sequence)
        self._free_blocks += sequence.held_blocks
        self._unfit.append(self._unfit_of(sequence))

    def _cannot_ever_fit(self, sequence: Sequence) -> bool:
        if self.state.limits.blocks(sequence.known) <= self.state.limits.total_blocks:
            return False
        self._unfit.append(self._unfit_of(sequence))
        return True

    def _unfit_of(self, sequence: Sequence) -> Unfit:
        limits = self.state.limits
        return Unfit(
            sequence.key,
            f"{sequence.known} tokens need {limits.blocks(sequence.known)} KV blocks of {limits.block_size}; "
            f"this worker's whole pool has {limits.total_blocks}",
        )

    # -- admission ---------------------------------------------------------------------------------------------------

    @cached_property
    def _ahead(self) -> list[Growth]:
        """How all that are alive will grow, longest-lived first; the admitted join it."""
        return sorted(self.state.growth_of(sequence) for sequence in self._alive)

    def _why_stop(self, sequence: Sequence, share: Share) -> Wait | None:
        """A reason that holds for everybody behind this sequence as well."""
        if len(self._alive) >= self.state.limits.max_sequences:
            return Wait.SLOTS
        return Wait.BUDGET if share(sequence.gap, self) == 0 else None

    def _fits(self, sequence: Sequence, newcomer: Growth) -> bool:
        """Its known tokens fit now, and all together will fit at their peak. Alone it may start whatever the estimate
        says.
        """
        limits = self.state.limits
        if limits.blocks(sequence.known) > self._free_blocks:
            return False
        return (
            not self._alive or peak_blocks(sorted([*self._ahead, newcomer]), limits.block_size) <= limits.total_blocks
        )

    def _may_pass(self, blocked: Sequence, newcomer: Growth) -> bool:
        """True if the blocked one starts no later with the newcomer in front: it will be gone by then, or there is
        room for both.
        """
        limits = self.state.limits
        head = self.state.growth_of(blocked)
        start = earliest_start(self._ahead, head, limits.block_size, limits.total_blocks)
        if newcomer.to_come < start:
            return True
        then = sorted([*survivors([*self._ahead, newcomer], start), head])
        return peak_blocks(then, limits.block_size) <= limits.total_blocks

    def _blame(self, sequences: list[Sequence], reason: Wait) -> None:
        for sequence in sequences:
            self._reasons.setdefault(sequence.key, reason)
