"""The one owner of KV blocks: hands them out, counts who refers to them, takes them back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from workers.kv.ledger import BlockState, Ledger, LedgerDrift, Reason


class OutOfBlocks(Exception):
    """More blocks were asked for than are free; nothing was taken. Planning counts first, so this is a bug, not a
    load.
    """


class BlockPool:
    """Blocks are reused in the order they were freed (first freed, first reused). A sequence gives its blocks back
    tail first, so the head of a prompt, the part another request may share, is overwritten last (as in vLLM's block
    pool).
    """

    def __init__(self, total_blocks: int) -> None:
        self.ledger = Ledger(total_blocks)
        self._free: deque[int] = deque(range(total_blocks))
        self._references = [0] * total_blocks

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def allocate(self, count: int, reason: Reason) -> tuple[int, ...]:
        """Takes `count` free blocks, each with one reference. Raises OutOfBlocks, taking none, when there are fewer."""
        if count > len(self._free):
            raise OutOfBlocks(
                f"{count} blocks asked for ({reason}), {len(self._free)} of {self.ledger.total_blocks} free"
            )
        taken = tuple(self._free.popleft() for _ in range(count))
        self.ledger.move(taken, BlockState.FREE, BlockState.HELD, reason)
        for block_id in taken:
            self._references[block_id] = 1
        return taken

    def share(self, block_ids: Iterable[int]) -> None:
        """One more reference to each of these held blocks."""
        for block_id in block_ids:
            if self._references[block_id] < 1:
                raise LedgerDrift(f"block {block_id} is shared while nobody holds it")
            self._references[block_id] += 1

    def release(self, block_ids: Sequence[int], reason: Reason) -> int:
        """Drops one reference from each, last block first; returns how many became free."""
        freed = 0
        for block_id in reversed(block_ids):
            if self._references[block_id] < 1:
                raise LedgerDrift(f"block {block_id} is released ({reason}) while nobody holds it")
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                self.ledger.move((block_id,), BlockState.HELD, BlockState.FREE, reason)
                self._free.append(block_id)
                freed += 1
        return freed

    def references(self, block_id: int) -> int:
        return self._references[block_id]

    def check(self) -> None:
        """Raises LedgerDrift unless ledger, free list and reference counts tell the same story. O(total blocks)."""
        self.ledger.check()
        if len(set(self._free)) != len(self._free) or len(self._free) != self.ledger.free_blocks:
            raise LedgerDrift(
                f"the free list has {len(self._free)} entries, the ledger {self.ledger.free_blocks} free blocks"
            )
        for block_id, references in enumerate(self._references):
            held = self.ledger.state_of(block_id) is BlockState.HELD
            if held != (references > 0):
                raise LedgerDrift(
                    f"block {block_id} is {self.ledger.state_of(block_id).name} with {references} references"
                )
