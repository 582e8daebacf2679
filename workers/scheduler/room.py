"""What a step may do with KV blocks: which of a sequence's tokens are computed already, and the running count of blocks
that are left while a draft grows, admits and preempts.

Exact under sharing: a victim gives back only what nobody else refers to, two victims that share a block give it back
with the second, and a block found in the cache costs one allocatable block for the first sequence that takes it and
nothing for the next.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from workers.scheduler.sequence import Sequence, SequenceKey


@dataclass(frozen=True)
class Hit:
    """What of a waiting sequence's known tokens need not be computed, as the KV side sees it before the step."""

    tokens: int = 0
    """Computed already: fewer than are known, so that there is a row to sample from."""
    block_ids: tuple[int, ...] = ()
    """The head of its table, full blocks that need no computing; whoever holds them now, they are shared from then
    on."""
    host_slots: tuple[int, ...] = ()
    """Blocks after these that come back from host memory: each into a new block."""
    copy_of: int | None = None
    """The block after those, held by somebody: its content is copied into a new block, because this sequence will write
    into it."""
    frontier: bytes | None = None
    """Hash of the first full block that is missing, equal for equal prefixes; None where waiting for it would save
    nothing."""
    pending: bool = False
    """A running sequence is going to compute that block: waiting for it is cheaper than computing it twice."""


NO_HIT = Hit()


class Books(Protocol):
    """The block accounts, to a policy: read only, and unchanged while a step is planned."""

    def hit_of(self, sequence: Sequence) -> Hit: ...

    def shared_ids(self, key: SequenceKey) -> tuple[int, ...]:
        """Blocks of its table that other tables name too."""
        ...

    def references(self, block_id: int) -> int:
        """Tables that name the block."""
        ...


class Unshared:
    """Books of a pool where nothing is cached and every block has one holder."""

    def hit_of(self, sequence: Sequence) -> Hit:
        return NO_HIT

    def shared_ids(self, key: SequenceKey) -> tuple[int, ...]:
        return ()

    def references(self, block_id: int) -> int:
        return 0


class Room:
    """Blocks left in a draft. `free` counts what an allocation may take: free blocks and cached ones."""

    def __init__(self, books: Books, free_blocks: int, block_size: int) -> None:
        self.free = free_blocks
        self._books = books
        self._block_size = block_size
        self._booked: dict[SequenceKey, int] = {}
        """New blocks that this draft gave to a running sequence."""
        self._references: Counter[int] = Counter()
        """How the draft has changed the number of tables that name a block."""
        self._borrowed: dict[tuple[int, ...], int] = {}
        """Answers of `borrowed` since the last change: many that wait have the same beginning."""

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def missing(self, sequence: Sequence) -> int:
        """Blocks that a running sequence lacks for its known tokens."""
        return max(0, self.blocks(sequence.known) - sequence.held_blocks)

    def grow(self, sequence: Sequence) -> None:
        """Gives a running sequence the blocks it lacks; the caller has seen that there are enough."""
        missing = self.missing(sequence)
        self._booked[sequence.key] = missing
        self.free -= missing

    def give_back(self, sequence: Sequence) -> None:
        """A running sequence loses its table, and what this draft has booked for it."""
        shared = self._books.shared_ids(sequence.key)
        self.free += sequence.held_blocks - len(shared) + self._booked.pop(sequence.key, 0)
        self.free += sum(self._holders(block_id) == 1 for block_id in shared)
        self._references.subtract(shared)
        self._borrowed.clear()

    def alone(self, sequence: Sequence) -> int:
        """Blocks that would be free without this running sequence, those booked by the draft aside."""
        shared = self._books.shared_ids(sequence.key)
        return sequence.held_blocks - len(shared) + sum(self._holders(block_id) == 1 for block_id in shared)

    def borrowed(self, hit: Hit) -> int:
        """How many blocks of a hit somebody holds: they cost nothing."""
        if hit.block_ids not in self._borrowed:
            self._borrowed[hit.block_ids] = sum(self._holders(block_id) > 0 for block_id in hit.block_ids)
        return self._borrowed[hit.block_ids]

    def price(self, sequence: Sequence, hit: Hit) -> int:
        """Allocatable blocks that starting a waiting sequence takes: new ones, and those it finds cached."""
        return self.blocks(sequence.known) - self.borrowed(hit)

    def start(self, sequence: Sequence, hit: Hit) -> None:
        """Books a waiting sequence's whole table."""
        self.free -= self.price(sequence, hit)
        self._references.update(hit.block_ids)
        self._borrowed.clear()

    def _holders(self, block_id: int) -> int:
        return self._books.references(block_id) + self._references[block_id]
