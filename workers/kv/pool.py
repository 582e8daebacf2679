"""The one owner of KV blocks: hands them out, counts who refers to them, takes them back, and keeps what nobody refers
to for the next request with the same beginning.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

from workers.kv.index import PrefixIndex
from workers.kv.ledger import BlockState, Ledger, LedgerDrift, Reason


class OutOfBlocks(Exception):
    """More blocks were asked for than are allocatable; nothing was taken. Planning counts first, so this is a bug, not
    a load.
    """


Evicted = Callable[[bytes, int], None]
"""Told the hash and the id of a cached block just before it is handed out for something else."""


class BlockPool:
    """Free blocks are reused in the order they were freed. A registered block that nobody refers to is cached, and
    gives way only when no block is free: the least recently used first. A sequence gives its blocks back tail first, so
    the head of a prompt, the part another request may share, is overwritten last (as in vLLM's block pool).

    With `retain` False nothing outlives its last holder: blocks are shared only between sequences that are alive.
    """

    def __init__(self, total_blocks: int, *, retain: bool = True, evicted: Evicted | None = None) -> None:
        self.ledger = Ledger(total_blocks)
        self.index = PrefixIndex()
        self._retain = retain
        self._evicted = evicted
        self._free: deque[int] = deque(range(total_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Oldest first."""
        self._references = [0] * total_blocks

    @property
    def allocatable_blocks(self) -> int:
        """Free ones, and cached ones, which give way."""
        return len(self._free) + len(self._cached)

    def allocate(self, count: int, reason: Reason) -> tuple[int, ...]:
        """Takes `count` blocks, each with one reference. Raises OutOfBlocks, taking none, when there are fewer."""
        if count > self.allocatable_blocks:
            raise OutOfBlocks(
                f"{count} blocks asked for ({reason}), {self.allocatable_blocks} of {self.ledger.total_blocks} free"
            )
        for _ in range(count - len(self._free)):
            self._evict_oldest()
        taken = tuple(self._free.popleft() for _ in range(count))
        self.ledger.move(taken, BlockState.FREE, BlockState.HELD, reason)
        for block_id in taken:
            self._references[block_id] = 1
        return taken

    def pin(self, block_ids: Iterable[int], reason: Reason) -> int:
        """One more reference to each of these held or cached blocks; returns how many were held already."""
        held = 0
        for block_id in block_ids:
            if self._references[block_id]:
                held += 1
            elif block_id in self._cached:
                del self._cached[block_id]
                self.ledger.move((block_id,), BlockState.CACHED, BlockState.HELD, reason)
            else:
                raise LedgerDrift(f"block {block_id} is pinned ({reason}) while it is neither held nor cached")
            self._references[block_id] += 1
        return held

    def release(self, block_ids: Sequence[int], reason: Reason) -> int:
        """Drops one reference from each, last block first; returns how many became allocatable."""
        released = 0
        for block_id in reversed(block_ids):
            if self._references[block_id] < 1:
                raise LedgerDrift(f"block {block_id} is released ({reason}) while nobody holds it")
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                self._lay_down(block_id, reason)
                released += 1
        return released

    def register(self, block_id: int, block_hash: bytes) -> bool:
        """Names the content of a held block. False where the hash has a block already, or the block a hash."""
        if self._references[block_id] < 1:
            raise LedgerDrift(f"block {block_id} is registered while nobody holds it")
        return self.index.put(block_hash, block_id)

    def unregister(self, block_ids: Iterable[int], reason: Reason) -> None:
        """Nobody will find these blocks again; who holds them keeps them."""
        for block_id in block_ids:
            self.index.drop(block_id)
            if block_id in self._cached:
                del self._cached[block_id]
                self.ledger.move((block_id,), BlockState.CACHED, BlockState.FREE, reason)
                self._free.append(block_id)

    def references(self, block_id: int) -> int:
        return self._references[block_id]

    def check(self) -> None:
        """Raises LedgerDrift unless ledger, lists, index and reference counts tell the same story. O(total blocks)."""
        self.ledger.check()
        self.index.check()
        for name, blocks, booked in (
            ("free", self._free, self.ledger.free_blocks),
            ("cached", self._cached, self.ledger.cached_blocks),
        ):
            if len(set(blocks)) != len(blocks) or len(blocks) != booked:
                raise LedgerDrift(f"the {name} list has {len(blocks)} entries, the ledger {booked} {name} blocks")
        for block_id, references in enumerate(self._references):
            state = self.ledger.state_of(block_id)
            named = self.index.hash_of(block_id) is not None
            if (state is BlockState.HELD) != (references > 0):
                raise LedgerDrift(f"block {block_id} is {state.name} with {references} references")
            if (state is BlockState.CACHED) != (block_id in self._cached) or (state is BlockState.FREE and named):
                raise LedgerDrift(f"block {block_id} is {state.name}, named {named}, and in the wrong list")
            if state is BlockState.CACHED and not named:
                raise LedgerDrift(f"block {block_id} is cached and nobody can find it")

    def _lay_down(self, block_id: int, reason: Reason) -> None:
        """The last reference is gone."""
        if not self._retain:
            self.index.drop(block_id)
        if self.index.hash_of(block_id) is not None:
            self.ledger.move((block_id,), BlockState.HELD, BlockState.CACHED, reason)
            self._cached[block_id] = None
        else:
            self.ledger.move((block_id,), BlockState.HELD, BlockState.FREE, reason)
            self._free.append(block_id)

    def _evict_oldest(self) -> None:
        block_id, _ = self._cached.popitem(last=False)
        block_hash = self.index.drop(block_id)
        self.ledger.move((block_id,), BlockState.CACHED, BlockState.FREE, Reason.EVICT)
        self._free.append(block_id)
        if self._evicted is not None and block_hash is not None:
            self._evicted(block_hash, block_id)
