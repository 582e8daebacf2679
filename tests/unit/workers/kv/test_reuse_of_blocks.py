"""Which blocks are kept, which give way first, and what host memory keeps of them."""

from __future__ import annotations

import pytest

from workers.kv.host import HostTier
from workers.kv.ledger import BlockState, LedgerDrift, Reason
from workers.kv.moves import Move, MoveKind
from workers.kv.pool import BlockPool
from workers.kv.tables import BlockTables


def name(number: int) -> bytes:
    return number.to_bytes(16, "little")


def cached(pool: BlockPool, count: int, first_name: int = 0) -> tuple[int, ...]:
    """Blocks that one sequence has filled, registered and given back."""
    table = pool.allocate(count, Reason.ADMIT)
    for place, block_id in enumerate(table):
        assert pool.register(block_id, name(first_name + place))
    pool.release(table, Reason.FINISH)
    return table


def test_what_is_registered_stays_and_counts_as_allocatable() -> None:
    pool = BlockPool(4)
    table = cached(pool, 3)
    assert (pool.ledger.free_blocks, pool.ledger.cached_blocks, pool.allocatable_blocks) == (1, 3, 4)
    assert pool.pin(table[:2], Reason.ADMIT) == 0
    assert pool.pin(table[:1], Reason.ADMIT) == 1
    assert (pool.ledger.held_blocks, pool.allocatable_blocks) == (2, 2)
    pool.check()


def test_free_blocks_go_before_cached_ones_and_the_tail_before_the_head() -> None:
    evicted: list[bytes] = []
    pool = BlockPool(5, evicted=lambda block_hash, _: evicted.append(block_hash))
    table = cached(pool, 3)
    pool.allocate(2, Reason.ADMIT)
    assert evicted == []
    assert pool.allocate(2, Reason.ADMIT) == (table[2], table[1])
    assert evicted == [name(2), name(1)]
    assert pool.index.block_of(name(0)) == table[0]
    assert pool.ledger.moves_by_reason[(BlockState.CACHED, BlockState.FREE, Reason.EVICT)] == 2
    pool.check()


def test_the_least_recently_used_goes_first() -> None:
    pool = BlockPool(2)
    (older,), (newer,) = cached(pool, 1, 0), cached(pool, 1, 1)
    pool.pin((older,), Reason.ADMIT)
    pool.release((older,), Reason.FINISH)
    assert pool.allocate(1, Reason.ADMIT) == (newer,)


def test_the_first_block_of_a_hash_keeps_it() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(2, Reason.ADMIT)
    assert pool.register(first, name(7))
    assert not pool.register(second, name(7))
    assert not pool.register(first, name(8))
    pool.release((second,), Reason.FINISH)
    assert pool.ledger.state_of(second) is BlockState.FREE
    assert pool.index.block_of(name(7)) == first


def test_what_is_unregistered_is_found_by_nobody_and_stays_with_its_holders() -> None:
    pool = BlockPool(3)
    table = cached(pool, 2)
    pool.pin(table[:1], Reason.ADMIT)
    pool.unregister(table, Reason.FAIL)
    assert [pool.index.block_of(name(place)) for place in range(2)] == [None, None]
    assert [pool.ledger.state_of(block) for block in table] == [BlockState.HELD, BlockState.FREE]
    pool.check()


def test_a_free_block_can_neither_be_pinned_nor_registered() -> None:
    pool = BlockPool(2)
    with pytest.raises(LedgerDrift, match="neither held nor cached"):
        pool.pin((0,), Reason.ADMIT)
    with pytest.raises(LedgerDrift, match="registered while nobody holds it"):
        pool.register(0, name(0))


def test_a_table_starts_with_what_was_found_and_grows_from_there() -> None:
    tables = BlockTables(BlockPool(4), block_size=4)
    found = cached(tables.pool, 2)
    assert tables.adopt("a", found, Reason.ADMIT) == 0
    assert tables.adopt("b", found, Reason.ADMIT) == 2
    tables.grow("b", 9, Reason.ADMIT)
    assert tables.block_ids("b")[:2] == found
    with pytest.raises(LedgerDrift, match="has a table of 3 blocks already"):
        tables.adopt("b", found, Reason.ADMIT)
    tables.check()


def test_host_slots_go_by_last_use_and_never_while_a_move_needs_them() -> None:
    tier = HostTier(2)
    assert tier.keep(name(0), 5) == Move(MoveKind.OUT, 5, 0)
    assert tier.keep(name(1), 6) == Move(MoveKind.OUT, 6, 1)
    assert tier.keep(name(2), 7) is None, "both slots are being written"
    tier.settle()
    assert tier.keep(name(0), 9) is None, "it is there already, and is the younger one now"
    assert tier.read(name(1)) == 1
    assert tier.keep(name(3), 8) == Move(MoveKind.OUT, 8, 0), "the other one is being read"
    assert (tier.slot_of(name(0)), tier.slot_of(name(1))) == (None, 1)
    with pytest.raises(LedgerDrift, match="host memory has no block"):
        tier.read(name(0))
    tier.check()


def test_what_host_memory_cannot_be_trusted_with_is_forgotten() -> None:
    tier = HostTier(3)
    for number in range(3):
        tier.keep(name(number), number)
    tier.forget([0])
    tier.discard([name(1)])
    assert [tier.slot_of(name(number)) for number in range(3)] == [None, None, 2]
    tier.check()
    assert tier.keep(name(4), 9) is not None
