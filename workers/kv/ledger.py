"""The account of every KV block: which state it is in, and why it last changed.

A block is *free*, *held* (some table refers to it) or *cached* (nobody refers to it, its content may be hit again).
Every change of state passes through `Ledger.move`, which refuses one that does not start where the block really is:
so a double free or a lost block is named where it happens, not when the pool runs dry an hour later.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum, StrEnum

REMEMBERED_TRANSITIONS = 64
"""How many of the last transitions an error can tell about."""


class BlockState(IntEnum):
    FREE = 0
    CACHED = 1
    HELD = 2


class Reason(StrEnum):
    """Why a block changed its state."""

    ADMIT = "admit"
    GROW = "grow"
    FINISH = "finish"
    PREEMPT = "preempt"
    CANCEL = "cancel"
    FAIL = "fail"
    EVICT = "evict"
    """Its content gives way to somebody's new tokens."""


@dataclass(frozen=True)
class Transition:
    block_id: int
    source: BlockState
    target: BlockState
    reason: Reason

    def __str__(self) -> str:
        return f"{self.block_id}: {self.source.name}→{self.target.name} ({self.reason})"


class LedgerDrift(Exception):
    """The books do not balance; the message names the block or the count that drifted, and the last transitions."""


class Ledger:
    """States of blocks 0 … total_blocks-1, all free at first. Not thread-safe: one engine thread owns it."""

    def __init__(self, total_blocks: int) -> None:
        if total_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {total_blocks}")
        self.total_blocks = total_blocks
        self._states = [BlockState.FREE] * total_blocks
        self._counts = {BlockState.FREE: total_blocks, BlockState.CACHED: 0, BlockState.HELD: 0}
        self._recent: deque[Transition] = deque(maxlen=REMEMBERED_TRANSITIONS)
        self.moves_by_reason: Counter[tuple[BlockState, BlockState, Reason]] = Counter()

    @property
    def free_blocks(self) -> int:
        return self._counts[BlockState.FREE]

    @property
    def cached_blocks(self) -> int:
        return self._counts[BlockState.CACHED]

    @property
    def held_blocks(self) -> int:
        return self._counts[BlockState.HELD]

    def state_of(self, block_id: int) -> BlockState:
        return self._states[block_id]

    def move(self, block_ids: Iterable[int], source: BlockState, target: BlockState, reason: Reason) -> None:
        """Takes each block from `source` to `target`. Raises LedgerDrift at the first one that is not in `source`."""
        for block_id in block_ids:
            actual = self._states[block_id]
            if actual is not source:
                raise LedgerDrift(
                    f"block {block_id} should go {source.name}→{target.name} ({reason}) but is {actual.name}; "
                    + self._history()
                )
            self._states[block_id] = target
            self._counts[source] -= 1
            self._counts[target] += 1
            self.moves_by_reason[(source, target, reason)] += 1
            self._recent.append(Transition(block_id, source, target, reason))

    def check(self) -> None:
        """Recounts everything, O(total blocks). Raises LedgerDrift unless free + cached + held = total, each as
        counted.
        """
        recount = Counter(self._states)
        for state, counted in self._counts.items():
            if recount[state] != counted:
                raise LedgerDrift(
                    f"{state.name} is booked as {counted} but {recount[state]} blocks are; {self._history()}"
                )
        if sum(self._counts.values()) != self.total_blocks:
            raise LedgerDrift(
                f"free {self.free_blocks} + cached {self.cached_blocks} + held {self.held_blocks} "
                f"is not the total {self.total_blocks}; {self._history()}"
            )

    def _history(self) -> str:
        return "last: " + (", ".join(str(transition) for transition in list(self._recent)[-8:]) or "none")
