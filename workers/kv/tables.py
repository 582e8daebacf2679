"""Which blocks hold the KV of which sequence: one append-only block table per sequence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from workers.kv.ledger import LedgerDrift, Reason
from workers.kv.pool import BlockPool


class BlockTables:
    """Tables by key; position p of a sequence lives in slot p % block_size of its block p // block_size.

    Tables are tuples, replaced when they grow (once in `block_size` tokens), so a plan can hold one without copying it.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self._tables: dict[Hashable, tuple[int, ...]] = {}

    def block_ids(self, key: Hashable) -> tuple[int, ...]:
        """The whole table; empty for an unknown key."""
        return self._tables.get(key, ())

    def adopt(self, key: Hashable, block_ids: tuple[int, ...], reason: Reason) -> int:
        """Starts a table with blocks that are there already; returns how many others held. Raises LedgerDrift for a key
        that has a table.
        """
        if self._tables.get(key):
            raise LedgerDrift(f"{key} has a table of {len(self._tables[key])} blocks already")
        held = self.pool.pin(block_ids, reason)
        self._tables[key] = block_ids
        return held

    def grow(self, key: Hashable, tokens: int, reason: Reason) -> int:
        """Makes room for `tokens` slots in all; returns the table's length in blocks. Raises OutOfBlocks, changing
        nothing.
        """
        table = self._tables.get(key, ())
        missing = -(-tokens // self.block_size) - len(table)
        if missing > 0:
            table += self.pool.allocate(missing, reason)
            self._tables[key] = table
        return len(table)

    def drop(self, key: Hashable, reason: Reason) -> int:
        """Gives the whole table back, tail first; returns how many blocks became free. An unknown key gives back
        nothing.
        """
        return self.pool.release(self._tables.pop(key, ()), reason)

    def keys(self) -> tuple[Hashable, ...]:
        return tuple(self._tables)

    def check(self) -> None:
        """Raises LedgerDrift unless every reference in the pool is some table's, and the pool's own books balance."""
        self.pool.check()
        referred = Counter(block_id for table in self._tables.values() for block_id in table)
        for block_id in range(self.pool.ledger.total_blocks):
            if referred[block_id] != self.pool.references(block_id):
                raise LedgerDrift(
                    f"block {block_id} has {self.pool.references(block_id)} references, "
                    f"tables name it {referred[block_id]} times"
                )
