"""A step plan in the making: the passes that every policy composes.

All of it is counting. The draft keeps its own numbers of tokens left and survivors, and of blocks in a `Room`; state
and sequences are only read.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from functools import cached_property

from workers.scheduler.pace import prefill_tokens
from workers.scheduler.peak import Growth, growth, survivors
from workers.scheduler.room import Hit, Room
from workers.scheduler.sequence import Sequence, SequenceKey
from workers.scheduler.state import SchedulerState, StepPlan, Unfit, Wait, Work

MAX_OVERTAKES = 32
"""A blocked sequence is passed by at most so many later ones, whatever the estimates promise."""
MAX_OVERTAKES_OF_A_TWIN = 256
"""Who has been passed by so many waits for nobody's prefix any more. It holds no place while it waits, so a pool that
forgets the prefix again and again could keep it there for ever."""
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
        self._room = Room(state.books, state.free_blocks, state.limits.block_size)
        self._alive = list(state.running)
        self._gone: set[SequenceKey] = set()
        self._work: dict[SequenceKey, Work] = {}
        self._admitted: list[SequenceKey] = []
        self._preempted: list[Sequence] = []
        self._unfit: list[Unfit] = []
        self._reasons: dict[SequenceKey, Wait] = {}
        self._head_start: int | None = None
        """When the first blocked sequence may start, for the growths ahead as they are now; None: to be worked out."""
        self._frontiers: set[bytes] = set()
        """Blocks that the admitted are going to compute first."""

    def advance_decodes(self) -> None:
        """Every running sequence with one token to compute gets it; blocks that run out are taken from victims."""
        decodes = [sequence for sequence in self._alive if sequence.gap == 1]
        if len(decodes) > self.tokens_left:
            decodes.sort(key=lambda sequence: (sequence.advanced_iteration, sequence.place))
        for sequence in decodes:
            if self.tokens_left == 0:
                break
            if self._is_alive(sequence) and self._make_room(sequence):
                self._compute(sequence, sequence.computed, 1)

    def keep_pace(self, now: float) -> None:
        """Leaves as many tokens to prefills as the decodes planned so far have time for, where they have due times."""
        due = [s.due_s for s in self._alive if s.due_s is not None and s.key in self._work]
        if not due:
            return
        starts = [sequence.computed for sequence in self._alive if sequence.gap > 1]
        starts += [self.state.books.hit_of(sequence).tokens for sequence in self.state.waiting[:1]]
        self.tokens_left = prefill_tokens(
            self.state.step_time,
            [(work.start, work.count) for work in self._work.values()],
            min(due),
            now,
            start=max(starts, default=0),
            cap=self.state.limits.chunk_tokens,
            most=self.tokens_left,
        )

    def advance_prefills(self, share: Share) -> None:
        """Running sequences with a longer gap go on, first come first. Their blocks were all taken when they were
        admitted.
        """
        for sequence in sorted(self._alive, key=lambda sequence: sequence.place):
            if sequence.gap > 1:
                count = share(sequence.gap, self) if self._is_alive(sequence) else 0
                if count and self._make_room(sequence):
                    self._compute(sequence, sequence.computed, count)

    def admit_waiting(self, share: Share) -> None:
        """Starts waiting sequences in their order. The first that blocks cannot take reserves its place: a later one
        may pass only if by the estimates that does not delay it, and no blocked one is passed by more than
        MAX_OVERTAKES.
        """
        if self._preempted:  # what was just pushed out must not compete with what pushed it
            self._blame(self.state.waiting, Wait.BLOCKS)
            return
        blocked: Sequence | None = None
        overtakes = 0
        for place, sequence in enumerate(self.state.waiting):
            hit = self.state.books.hit_of(sequence)
            gap = sequence.known - hit.tokens
            stop = self._why_stop(gap, share)
            if stop is None and blocked is not None:
                worn_out = place > LOOK_AHEAD or overtakes >= MAX_OVERTAKES
                stop = Wait.BLOCKS if worn_out else None
            if stop is not None:
                self._blame(self.state.waiting[place:], stop)
                return
            if self._cannot_ever_fit(sequence) or self._awaits_its_prefix(sequence, hit):
                continue
            newcomer = self._growth_after(sequence, hit)
            if self._fits(sequence, hit, newcomer) and (blocked is None or self._may_pass(blocked, newcomer)):
                insort(self._ahead, newcomer)
                self._head_start = None
                overtakes += blocked is not None
                self._admit(sequence, hit, share(gap, self))
            else:
                blocked = blocked or sequence
                overtakes = max(overtakes, sequence.overtaken)
                self._reasons[sequence.key] = Wait.BLOCKS

    def hold_back(self, sequences: list[Sequence], reason: Wait) -> None:
        """These wait because the policy does not offer them to this step."""
        self._blame(sequences, reason)

    def finished(self) -> StepPlan:
        self._blame(self._preempted, Wait.BLOCKS)
        return StepPlan(
            work=tuple(self._work.values()),
            admitted=tuple(self._admitted),
            preempted=tuple(sequence.key for sequence in self._preempted),
            unfit=tuple(self._unfit),
            waits=tuple(self._reasons.items()),
            held=frozenset(key for key, reason in self._reasons.items() if reason is Wait.PREFIX),
        )

    # -- one sequence ------------------------------------------------------------------------------------------------

    def _compute(self, sequence: Sequence, start: int, count: int) -> None:
        self._work[sequence.key] = Work(sequence.key, start, count)
        self.tokens_left = max(0, self.tokens_left - count)
        self.prefills += sequence.known - start > 1

    def _admit(self, sequence: Sequence, hit: Hit, count: int) -> None:
        self._room.start(sequence, hit)
        self._alive.append(sequence)
        self._admitted.append(sequence.key)
        if hit.frontier is not None:
            self._frontiers.add(hit.frontier)
        self._compute(sequence, hit.tokens, count)

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
        while self._room.missing(sequence) > self._room.free:
            if len(self._alive) == 1:  # the last survivor is never preempted: there is nobody to wait for
                self._give_up(sequence)
                return False
            victim = self._choose_victim()
            self._preempt(victim)
            if victim is sequence:
                return False
        self._room.grow(sequence)
        return True

    def _choose_victim(self) -> Sequence:
        """Lowest band first, then the fewest seconds of recompute per block freed, then the last in order. Who shares
        all its blocks frees none: such a one comes last. The protected were admitted with room for all of them
        together, so there is somebody else.
        """
        holders = [sequence for sequence in self._alive if sequence.held_blocks]
        exposed = [sequence for sequence in holders if not sequence.is_protected]
        freed = {sequence.key: self._room.alone(sequence) for sequence in exposed or holders}
        return min(
            exposed or holders,
            key=lambda sequence: (
                freed[sequence.key] == 0,
                -sequence.band,
                self._recompute_cost(sequence, freed[sequence.key]) / max(1, freed[sequence.key]),
                *(-part for part in sequence.place),
            ),
        )

    def _recompute_cost(self, sequence: Sequence, freed_blocks: int) -> float:
        """In seconds; in tokens until a pass has been measured. What others keep of its beginning is found again."""
        kept = min(sequence.computed, (sequence.held_blocks - freed_blocks) * self.state.limits.block_size)
        lost, step_time = sequence.computed - kept, self.state.step_time
        return step_time.recompute_s(lost, behind=kept) if step_time.is_fitted else float(lost)

    def _preempt(self, victim: Sequence) -> None:
        self._leave(victim)
        self._preempted.append(victim)
        self._room.give_back(victim)
        refund = self._work.pop(victim.key, None)
        if refund is not None:
            self.tokens_left += refund.count

    def _give_up(self, sequence: Sequence) -> None:
        self._leave(sequence)
        self._room.give_back(sequence)
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

    def _growth_after(self, sequence: Sequence, hit: Hit) -> Growth:
        """How a waiting sequence will grow once it runs; what it borrows is counted elsewhere."""
        borrowed_tokens = self._room.borrowed(hit) * self.state.limits.block_size
        return growth(sequence.known - borrowed_tokens, self.state.capacity.to_come(sequence))

    @cached_property
    def _capacity_blocks(self) -> int:
        """What all that are alive have to fit into."""
        return self.state.limits.total_blocks - self.state.unowned_blocks()

    def _awaits_its_prefix(self, sequence: Sequence, hit: Hit) -> bool:
        """Somebody who runs, or has just been admitted, computes the block that this one lacks: it finds that block,
        and those behind it, when it comes back. Nobody waits for what has ended: `pending` and the admitted are
        running.
        """
        if hit.frontier is None or not (hit.pending or hit.frontier in self._frontiers):
            return False
        if sequence.overtaken >= MAX_OVERTAKES_OF_A_TWIN:
            return False
        self._reasons[sequence.key] = Wait.PREFIX
        return True

    def _why_stop(self, gap: int, share: Share) -> Wait | None:
        """A reason that holds for everybody behind a sequence with this gap as well."""
        if len(self._alive) >= self.state.limits.max_sequences:
            return Wait.SLOTS
        return Wait.BUDGET if share(gap, self) == 0 else None

    def _fits(self, sequence: Sequence, hit: Hit, newcomer: Growth) -> bool:
        """Its known tokens fit now, and all together will fit as the capacity reckons. Alone it may start whatever the
        reckoning says.
        """
        if self._room.price(sequence, hit) > self._room.free:
            return False
        if not self._alive:
            return True
        together = sorted([*self._ahead, newcomer])
        need = self.state.capacity.need_blocks(together, self.state.limits.block_size)
        return need <= self._capacity_blocks and (not sequence.is_protected or self._protects(sequence))

    def _protects(self, newcomer: Sequence) -> bool:
        """True if the whole lengths of all that must not be preempted any more fit the pool side by side, so that none
        of them ever has to be.
        """
        blocks = self.state.limits.blocks
        protected = (newcomer, *(sequence for sequence in self._alive if sequence.is_protected))
        return sum(blocks(each.known + each.most_to_come - 1) for each in protected) <= self.state.limits.total_blocks

    def _may_pass(self, blocked: Sequence, newcomer: Growth) -> bool:
        """True if the blocked one starts no later with the newcomer in front: it will be gone by then, or there is
        room for both.
        """
        size, capacity = self.state.limits.block_size, self._capacity_blocks
        head = self._growth_after(blocked, self.state.books.hit_of(blocked))
        if self._head_start is None:
            self._head_start = self.state.capacity.earliest_start(self._ahead, head, size, capacity)
        start = self._head_start
        if newcomer.to_come < start:
            return True
        then = sorted([*survivors([*self._ahead, newcomer], start), head])
        return self.state.capacity.need_blocks(then, size) <= capacity

    def _blame(self, sequences: list[Sequence], reason: Wait) -> None:
        for sequence in sequences:
            self._reasons.setdefault(sequence.key, reason)
