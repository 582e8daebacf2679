"""What a policy reads and what it answers: plain data, no tensors, no block ids."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from workers.scheduler.capacity import Capacity, OverCommit
from workers.scheduler.peak import Growth, growth
from workers.scheduler.room import Books, Unshared
from workers.scheduler.sequence import Sequence, SequenceKey
from workers.scheduler.step_time import Features, StepTime, pass_of


class Wait(StrEnum):
    """Why a sequence that could run does not."""

    BUDGET = "budget"
    """The step's tokens are spent."""
    BLOCKS = "blocks"
    """Its prompt does not fit now, or the peak test says that it would not fit later."""
    SLOTS = "slots"
    """As many sequences run as may."""
    PREFIX = "prefix"
    """Somebody is computing the same prefix just now."""
    BATCH = "batch"
    """The policy collects a batch, or one that was formed without it is running."""
    BOUNDARY = "boundary"
    """It came during an iteration; the next begins when that one ends."""


@dataclass(frozen=True)
class Limits:
    """Bounds of one step. Raises ValueError for one that could never run anything."""

    chunk_tokens: int
    max_sequences: int
    total_blocks: int
    block_size: int

    def __post_init__(self) -> None:
        for name in ("chunk_tokens", "max_sequences", "total_blocks", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")

    def blocks(self, tokens: int) -> int:
        """Blocks that `tokens` KV slots take."""
        return -(-tokens // self.block_size)


@dataclass
class Batch:
    """What a batching policy has formed: it lasts until the last member has ended."""

    slots: int = 0
    members: set[SequenceKey] = field(default_factory=set)
    """Those that have not ended, whether they run or have lost their blocks for a while."""


@dataclass
class SchedulerState:
    """Everything a plan depends on besides the clock. `running` in order of start, `waiting` by place."""

    limits: Limits
    capacity: Capacity = field(default_factory=OverCommit)
    step_time: StepTime = field(default_factory=StepTime)
    itl_s: float | None = None
    """Inter-token latency that running sequences shall keep; None: the static cap alone bounds a step."""
    running: list[Sequence] = field(default_factory=list)
    waiting: list[Sequence] = field(default_factory=list)
    free_blocks: int = 0
    """Blocks an allocation may take: free ones, and cached ones that can be evicted."""
    books: Books = field(default_factory=Unshared)
    batch: Batch = field(default_factory=Batch)
    """Empty under policies that let sequences come and go with every step."""

    def growth_of(self, sequence: Sequence) -> Growth:
        """What it borrows is not counted as its own."""
        own = sequence.known - sequence.borrowed_blocks * self.limits.block_size
        return growth(own, self.capacity.to_come(sequence))

    def unowned_blocks(self) -> int:
        """Held blocks that every running sequence which names them has borrowed: who brought them has ended."""
        owned = sum(sequence.held_blocks - sequence.borrowed_blocks for sequence in self.running)
        return self.limits.total_blocks - self.free_blocks - owned

    def credit_blocks(self) -> int:
        """Blocks of new work that would pass the capacity's test now. What runs and what already waits here count in
        full; the newcomer is taken to hold its whole price from the start, because a price does not say how it splits
        into prompt and output.
        """
        if self.free_slots() == 0:
            return 0
        ahead = sorted(self.growth_of(sequence) for sequence in (*self.running, *self.waiting))
        need = self.capacity.need_blocks(ahead, self.limits.block_size)
        return max(0, self.limits.total_blocks - self.unowned_blocks() - need)

    def free_slots(self) -> int:
        return max(0, self.limits.max_sequences - len(self.running) - len(self.waiting))


@dataclass(frozen=True)
class Work:
    """Compute the known tokens [start, start + count) of one sequence."""

    key: SequenceKey
    start: int
    count: int


@dataclass(frozen=True)
class Unfit:
    """A sequence the whole pool cannot hold."""

    key: SequenceKey
    detail: str


@dataclass(frozen=True)
class StepPlan:
    """One iteration. To be applied in this order: preempted and unfit give their blocks back, admitted take all
    blocks of their known tokens, then `work` is computed.
    """

    work: tuple[Work, ...]
    admitted: tuple[SequenceKey, ...] = ()
    preempted: tuple[SequenceKey, ...] = ()
    unfit: tuple[Unfit, ...] = ()
    waits: tuple[tuple[SequenceKey, Wait], ...] = ()
    """Why each sequence that is left waiting does so, those that were just preempted among them."""
    padding: tuple[int, ...] = ()
    """Rows that make the batch rectangular, one entry per padded slice: computed, thrown away."""
    slots: int = 0
    """Sequence slots that the policy keeps for this batch; 0: each running sequence has its own, and there is no
    batch."""
    wake_at_s: float | None = None
    """Where there is no work: when, on the engine's clock, the policy wants to be asked again without any news."""
    held: frozenset[SequenceKey] = frozenset()
    """Waiting sequences that are held back on purpose and for a bounded time: they are not to be offered elsewhere."""

    @property
    def tokens(self) -> int:
        return sum(work.count for work in self.work)

    @property
    def waiting_by_reason(self) -> tuple[tuple[str, int], ...]:
        counted = Counter(reason for _, reason in self.waits)
        return tuple((reason.value, counted[reason]) for reason in Wait if counted[reason])

    @property
    def features(self) -> Features:
        """What the pass consists of, to the step-time model."""
        return pass_of([*((work.start, work.count) for work in self.work), *((0, rows) for rows in self.padding)])
