"""Random operations on pool, tables, prefix index and host tier beside a model of what every block really contains: the
books never drift, and whatever is found holds what its hash says.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random

import pytest

from headrace.prefix import block_hashes, root_hash
from workers.kv.host import HostTier
from workers.kv.ledger import Reason
from workers.kv.moves import Move, MoveKind
from workers.kv.pool import BlockPool
from workers.kv.prefixes import Prefixes
from workers.kv.tables import BlockTables

BLOCK_SIZE = 2
ROOT = root_hash("", "w", "tenant")


@dataclass
class Live:
    tokens: list[int]
    computed: int = 0


@dataclass
class Model:
    """Everything is done twice: by the code under test and, in plain sets and dicts, here."""

    random: Random
    total_blocks: int
    host_slots: int
    retain: bool = True
    live: dict[int, Live] = field(default_factory=dict)
    found_blocks: int = 0
    returned_blocks: int = 0
    evictions: int = 0

    def __post_init__(self) -> None:
        self.tier = HostTier(self.host_slots)
        self.pool = BlockPool(self.total_blocks, retain=self.retain, evicted=self._save)
        self.tables = BlockTables(self.pool, BLOCK_SIZE)
        self.prefixes = Prefixes(self.pool, BLOCK_SIZE, self.tier)
        self.device: list[tuple[int, ...] | None] = [None] * self.total_blocks
        """All tokens up to the end of the block, for full blocks."""
        self.host: list[tuple[int, ...] | None] = [None] * self.host_slots
        self.moves: list[Move] = []
        self._keys = iter(range(10**9))

    def step(self) -> None:
        """One operation; afterwards all books balance."""
        operation = self.random.choice((self.start, self.start, self.grow, self.grow, self.sample, self.end, self.fail))
        operation()
        self.pool.check()
        self.tier.check()
        self.compare()

    def start(self) -> None:
        """One to three sequences in one step: all pin before any allocates."""
        newcomers: list[tuple[int, Live, tuple[int, ...], tuple[bytes, ...]]] = []
        room = self.pool.allocatable_blocks
        pinned: set[int] = set()
        for _ in range(self.random.randint(1, 3)):
            key, live = (
                next(self._keys),
                Live([int(self.random.random() < 0.2) for _ in range(self.random.randint(1, 9))]),
            )
            self.prefixes.begin(key, ROOT, live.tokens)
            most = (len(live.tokens) - 1) // BLOCK_SIZE
            ids, in_host = self.prefixes.find(key, live.tokens, most)
            for place, block_id in enumerate(ids):
                assert self.device[block_id] == tuple(live.tokens[: (place + 1) * BLOCK_SIZE]), "a hit of other tokens"
            need = -(-len(live.tokens) // BLOCK_SIZE)
            free_ride = sum(1 for block_id in ids if self.pool.references(block_id) or block_id in pinned)
            if need - free_ride > room:
                self.prefixes.end(key)
                continue
            room -= need - free_ride
            pinned.update(ids)
            newcomers.append((key, live, ids, in_host))
        for key, live, ids, in_host in newcomers:
            self.tables.adopt(key, ids, Reason.ADMIT)
            for block_hash in in_host:
                self.tier.read(block_hash)
            self.live[key] = live
        for key, live, ids, in_host in newcomers:
            self.tables.grow(key, len(live.tokens), Reason.ADMIT)
            table = self.tables.block_ids(key)
            for place, block_hash in enumerate(in_host, start=len(ids)):
                slot = self.tier.slot_of(block_hash)
                assert slot is not None
                self.moves.append(Move(MoveKind.BACK, slot, table[place]))
                self.pool.register(table[place], block_hash)
            live.computed = (len(ids) + len(in_host)) * BLOCK_SIZE
            self.found_blocks += len(ids)
            self.returned_blocks += len(in_host)
            self.prefixes.started(key, len(ids) + len(in_host), None)
        self.carry_out()
        for key, live, ids, in_host in newcomers:
            for place in range(len(ids) + len(in_host)):
                content = self.device[self.tables.block_ids(key)[place]]
                assert content == tuple(live.tokens[: (place + 1) * BLOCK_SIZE]), "a move brought other tokens"

    def grow(self) -> None:
        """Computes all that is known, after a few more tokens."""
        if not self.live:
            return
        key = self.random.choice(list(self.live))
        live = self.live[key]
        more = self._tokens(self.random.randint(0, 3))
        need = -(-(len(live.tokens) + len(more)) // BLOCK_SIZE) - len(self.tables.block_ids(key))
        if need > self.pool.allocatable_blocks:
            return
        live.tokens += more
        self.tables.grow(key, len(live.tokens), Reason.GROW)
        self.carry_out()
        table = self.tables.block_ids(key)
        for place in range(live.computed // BLOCK_SIZE, -(-len(live.tokens) // BLOCK_SIZE)):
            end = (place + 1) * BLOCK_SIZE
            assert self.pool.references(table[place]) == 1, "somebody else's block is written"
            self.device[table[place]] = tuple(live.tokens[:end]) if end <= len(live.tokens) else None
        live.computed = len(live.tokens)

    def sample(self) -> None:
        """A clean sample: what is computed may be found."""
        if self.live:
            key = self.random.choice(list(self.live))
            live = self.live[key]
            self.prefixes.register(key, live.tokens, self.tables.block_ids(key), live.computed)

    def end(self) -> None:
        self._release(self.random.choice((Reason.FINISH, Reason.CANCEL, Reason.PREEMPT)))

    def fail(self) -> None:
        if self.random.random() < 0.2:
            self._release(Reason.FAIL)

    def _tokens(self, count: int) -> list[int]:
        """Mostly zeros, so that beginnings meet."""
        return [int(self.random.random() < 0.2) for _ in range(count)]

    def _release(self, reason: Reason) -> None:
        if not self.live:
            return
        key = self.random.choice(list(self.live))
        table = self.tables.block_ids(key)
        if reason is Reason.FAIL:
            names = [name for name in map(self.pool.index.hash_of, table) if name is not None]
            self.tier.discard(names)
            self.pool.unregister(table, reason)
        self.tables.drop(key, reason)
        self.prefixes.end(key)
        del self.live[key]

    def carry_out(self) -> None:
        for move in self.moves:
            if move.kind is MoveKind.OUT:
                self.host[move.target] = self.device[move.source]
            else:
                self.device[move.target] = self.host[move.source]
        self.moves.clear()
        self.tier.settle()

    def compare(self) -> None:
        """References, states and names, counted anew from the model."""
        referred = Counter(block_id for key in self.live for block_id in self.tables.block_ids(key))
        ledger = self.pool.ledger
        for block_id in range(self.total_blocks):
            assert self.pool.references(block_id) == referred[block_id]
            name = self.pool.index.hash_of(block_id)
            if name is not None:
                content = self.device[block_id]
                assert content is not None
                assert block_hashes(content, BLOCK_SIZE, weight_version="w", salt="tenant")[-1] == name
        assert ledger.held_blocks == len(referred)
        assert ledger.free_blocks + ledger.cached_blocks + ledger.held_blocks == self.total_blocks
        if not self.retain:
            assert ledger.cached_blocks == 0

    def _save(self, block_hash: bytes, block_id: int) -> None:
        self.evictions += 1
        move = self.tier.keep(block_hash, block_id)
        if move is not None:
            self.moves.append(move)


def run(operations: int, total_blocks: int, host_slots: int, *, seed: int, retain: bool = True) -> Model:
    model = Model(Random(seed), total_blocks, host_slots, retain)
    for _ in range(operations):
        model.step()
    while model.live:
        model.end()
    model.compare()
    assert model.pool.ledger.held_blocks == 0
    return model


@pytest.mark.parametrize(("total_blocks", "host_slots"), [(5, 1), (8, 3), (16, 0), (24, 40)])
def test_the_books_never_drift(total_blocks: int, host_slots: int) -> None:
    model = run(5_000, total_blocks, host_slots, seed=total_blocks)
    assert model.found_blocks > 100
    assert model.evictions > 100
    assert (model.returned_blocks > 10) == (host_slots > 0)


def test_without_retention_nothing_outlives_its_holders() -> None:
    model = run(2_000, 12, 0, seed=1, retain=False)
    assert model.evictions == 0
    assert model.found_blocks > 100, "those alive still share"


@pytest.mark.slow
def test_a_million_operations_do_not_drift_either() -> None:
    for seed in range(20):
        run(50_000, 4 + seed, seed // 2, seed=seed)
