"""Which block holds the KV of which chain of tokens, by the hashes of `headrace.prefix`."""

from __future__ import annotations

from collections.abc import Iterable

from workers.kv.ledger import LedgerDrift


class PrefixIndex:
    """One block for a hash, one hash for a block. The first block registered for a hash keeps it: a second one with the
    same content stays anonymous and is simply reused once it is free.
    """

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    def block_of(self, block_hash: bytes) -> int | None:
        return self._block_of.get(block_hash)

    def leading(self, hashes: Iterable[bytes]) -> tuple[int, ...]:
        """Blocks of the first of these hashes, up to one that has none. No Python runs per hash: long prompts have
        thousands, and are looked up again in every step that they wait.
        """
        return tuple(iter(map(self._block_of.get, hashes).__next__, None))

    def hash_of(self, block_id: int) -> bytes | None:
        return self._hash_of.get(block_id)

    def put(self, block_hash: bytes, block_id: int) -> bool:
        """False where either is taken already; nothing has changed then."""
        if block_hash in self._block_of or block_id in self._hash_of:
            return False
        self._block_of[block_hash] = block_id
        self._hash_of[block_id] = block_hash
        return True

    def drop(self, block_id: int) -> bytes | None:
        """The hash it had; None for an anonymous block."""
        block_hash = self._hash_of.pop(block_id, None)
        if block_hash is not None:
            del self._block_of[block_hash]
        return block_hash

    def check(self) -> None:
        """Raises LedgerDrift unless both directions tell the same story."""
        if {block: name for name, block in self._block_of.items()} != self._hash_of:
            raise LedgerDrift(
                f"the prefix index names {len(self._block_of)} hashes and {len(self._hash_of)} blocks that do not match"
            )
