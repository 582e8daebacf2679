"""What is known of each sequence's beginning: its chain of block hashes, how much of it is registered, and who is
computing which missing block just now.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from headrace.prefix import hashes_after
from workers.kv.host import HostTier
from workers.kv.pool import BlockPool


@dataclass
class _Chain:
    root: bytes
    hashes: list[bytes] = field(default_factory=list)
    """Of the full blocks of known tokens."""
    registered: int = 0
    """So many blocks of its table have been offered to the index, or were found there."""
    computes: bytes | None = None
    """The missing block that it was started to compute first."""


class Prefixes:
    """Chains by key. Pure bookkeeping beside the pool: blocks change hands in the pool and in the tables."""

    def __init__(self, pool: BlockPool, block_size: int, tier: HostTier | None = None) -> None:
        self._pool = pool
        self._block_size = block_size
        self._tier = tier
        self._chains: dict[Hashable, _Chain] = {}
        self._computed_by: dict[bytes, Hashable] = {}

    def begin(self, key: Hashable, root: bytes, tokens: Sequence[int]) -> None:
        """A sequence whose chain starts from `root` (adapter, weights, tenant) and knows these tokens."""
        self._chains[key] = _Chain(root)
        self._learn(self._chains[key], tokens)

    def end(self, key: Hashable) -> None:
        self.stopped(key)
        del self._chains[key]

    def hash_at(self, key: Hashable, block: int) -> bytes:
        """Of its block number `block`, which is full of known tokens."""
        return self._chains[key].hashes[block]

    def find(self, key: Hashable, tokens: Sequence[int], most_blocks: int) -> tuple[tuple[int, ...], tuple[bytes, ...]]:
        """The longest beginning of at most `most_blocks` blocks that is there: block ids, then hashes of what host
        memory has after them.
        """
        chain = self._chains[key]
        self._learn(chain, tokens)
        block_ids = self._pool.index.leading(islice(chain.hashes, most_blocks))
        if self._tier is None:
            return block_ids, ()
        return block_ids, self._find_in_host(self._tier, chain.hashes[len(block_ids) : most_blocks])

    def awaits(self, key: Hashable, most_blocks: int) -> bool:
        """One of its first `most_blocks` blocks is missing and `is_computing`; in the time of those that are, however
        long its chain is."""
        hashes = self._chains[key].hashes
        most_blocks = min(most_blocks, len(hashes))
        for block_hash, other in self._computed_by.items():
            place = self._chains[other].registered
            if place < most_blocks and hashes[place] == block_hash and self._pool.index.block_of(block_hash) is None:
                return True
        return False

    def is_computing(self, block_hash: bytes) -> bool:
        """Some running sequence was started to compute this block and has not shown it yet."""
        return block_hash in self._computed_by

    def started(self, key: Hashable, found_blocks: int, frontier: bytes | None) -> None:
        """It runs now, with so many blocks found, and computes `frontier` first; None where nobody would wait for
        it.
        """
        chain = self._chains[key]
        chain.registered = found_blocks
        if frontier is not None and frontier not in self._computed_by:
            chain.computes = frontier
            self._computed_by[frontier] = key

    def stopped(self, key: Hashable) -> None:
        """It runs no longer: nobody waits for its blocks, and what it computed is not its own any more."""
        chain = self._chains[key]
        chain.registered = 0
        self._arrived(chain)

    def register(self, key: Hashable, tokens: Sequence[int], table: Sequence[int], computed: int) -> None:
        """Its first `computed` tokens are in `table` and known to be sound: full blocks can be found from now on."""
        chain = self._chains[key]
        full = computed // self._block_size
        if full <= chain.registered and chain.computes is None:
            return
        self._learn(chain, tokens)
        for block in range(chain.registered, full):
            self._pool.register(table[block], chain.hashes[block])
        chain.registered = max(chain.registered, full)
        self._arrived(chain)

    def _arrived(self, chain: _Chain) -> None:
        if chain.computes is not None:
            del self._computed_by[chain.computes]
            chain.computes = None

    @staticmethod
    def _find_in_host(tier: HostTier, hashes: Sequence[bytes]) -> tuple[bytes, ...]:
        found = 0
        while found < len(hashes) and tier.slot_of(hashes[found]) is not None:
            found += 1
        return tuple(hashes[:found])

    def _learn(self, chain: _Chain, tokens: Sequence[int]) -> None:
        have = len(chain.hashes)
        if len(tokens) // self._block_size > have:
            parent = chain.hashes[-1] if chain.hashes else chain.root
            chain.hashes.extend(hashes_after(parent, tokens[have * self._block_size :], self._block_size))
