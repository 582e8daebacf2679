"""Request-level batching, as servers did it before iteration-level scheduling: a batch is collected, padded to a
rectangle, and keeps every slot until its slowest member ends. The two baselines that `docs/batching.md` measures.

Nothing of it is simulated. The rows that make a pass rectangular are in its plan, and the engine computes them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from workers.scheduler.draft import Draft
from workers.scheduler.room import Books, Hit
from workers.scheduler.sequence import Sequence, SequenceKey
from workers.scheduler.state import Limits, SchedulerState, StepPlan, Wait

MOST_SLOTS = 32
"""Most members of one batch, however many sequences the worker may run."""
STATIC_WAIT_S = 0.5
DYNAMIC_WAIT_S = 0.1


@dataclass(frozen=True)
class _WithoutTwins:
    """The books less their advice to let another one compute a common prefix first: in a batch nobody comes later."""

    books: Books

    def hit_of(self, sequence: Sequence) -> Hit:
        return replace(self.books.hit_of(sequence), frontier=None, pending=False)

    def shared_ids(self, key: SequenceKey) -> tuple[int, ...]:
        return self.books.shared_ids(key)

    def references(self, block_id: int) -> int:
        return self.books.references(block_id)


class _Batching:
    """What both share: who is collected, how long a batch lasts, and its padding. `wait_s` in seconds."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s

    def plan(self, state: SchedulerState, now: float) -> StepPlan:
        if state.running or state.batch.members:
            return self._go_on(state, now)
        due_s = self._due_s(state)
        if due_s is not None and now < due_s:
            return replace(self._compute(state, [], now), wake_at_s=due_s)
        return self._compute(state, first_batch(state.waiting, state.limits), now)

    def _time_out_s(self, pending: int, slots: int) -> float:
        """How long the oldest of so many pending sequences is held back for company."""
        raise NotImplementedError

    def _due_s(self, state: SchedulerState) -> float | None:
        """When the batch that is being collected goes; None: now."""
        slots = batch_slots(state.limits)
        if not 0 < len(state.waiting) < slots:
            return None
        oldest_s = min(sequence.advanced_s for sequence in state.waiting)
        return oldest_s + self._time_out_s(len(state.waiting), slots)

    def _go_on(self, state: SchedulerState, now: float) -> StepPlan:
        """The running batch, and those of its members that lost their blocks: nobody else joins."""
        returning = [sequence for sequence in state.waiting if sequence.key in state.batch.members]
        return self._compute(state, returning, now)

    def _compute(self, state: SchedulerState, joining: list[Sequence], now: float) -> StepPlan:
        """One decode for each running member, whole prefills of the joining; the others are held back."""
        others = [sequence for sequence in state.waiting if sequence not in joining]
        draft = Draft(replace(state, waiting=joining, books=_WithoutTwins(state.books)))
        draft.advance_decodes()
        draft.advance_prefills(_whole)
        draft.admit_waiting(_whole)
        draft.hold_back(others, Wait.BATCH)
        plan = draft.finished()
        slots = max(state.batch.slots if state.batch.members else 0, len(plan.work))
        return replace(plan, slots=slots, padding=padding_of(plan, slots), held=plan.held | self._held(others, now))

    def _held(self, sequences: list[Sequence], now: float) -> frozenset[SequenceKey]:
        return frozenset(sequence.key for sequence in sequences if now - sequence.advanced_s < self._wait_s)


class Static(_Batching):
    """A batch goes when it is full, or a fixed time after its oldest member came."""

    def __init__(self, wait_s: float = STATIC_WAIT_S) -> None:
        super().__init__(wait_s)

    def _time_out_s(self, pending: int, slots: int) -> float:
        return self._wait_s


class Dynamic(_Batching):
    """A batch goes after a time-out that shrinks with every member it gains, down to none when it is full: a lone
    request waits for company, half a batch waits half as long. Late arrivals join the pending batch only.
    """

    def __init__(self, wait_s: float = DYNAMIC_WAIT_S) -> None:
        super().__init__(wait_s)

    def _time_out_s(self, pending: int, slots: int) -> float:
        return self._wait_s * (1 - pending / slots)


def batch_slots(limits: Limits) -> int:
    """Members of a full batch; each can decode in every step, so there are no more than a step has tokens."""
    return min(limits.max_sequences, limits.chunk_tokens, MOST_SLOTS)


def first_batch(waiting: list[Sequence], limits: Limits) -> list[Sequence]:
    """The first of those waiting, at most a full batch. `chunk_tokens` does not bound a padded prefill, but a full
    batch of prompts of that length does: whoever would make the rectangle larger waits for the next. The first comes
    along whatever its length.
    """
    slots, widest = batch_slots(limits), 0
    for place, sequence in enumerate(waiting[:slots]):
        widest = max(widest, sequence.gap)
        if place and widest * (place + 1) > slots * limits.chunk_tokens:
            return waiting[:place]
    return waiting[:slots]


def padding_of(plan: StepPlan, slots: int) -> tuple[int, ...]:
    """The rows that fill a pass up to `slots` times its widest work: one entry for each slot that falls short."""
    counts = [work.count for work in plan.work] + [0] * (slots - len(plan.work))
    widest = max(counts, default=0)
    return tuple(widest - count for count in counts if count < widest)


def _whole(gap: int, _draft: Draft) -> int:
    return gap
