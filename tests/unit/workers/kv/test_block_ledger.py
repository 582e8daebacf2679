"""The books of the KV pool: they balance, and whoever breaks them is named."""

from __future__ import annotations

import pytest

from workers.kv.ledger import BlockState, Ledger, LedgerDrift, Reason
from workers.kv.pool import BlockPool, OutOfBlocks
from workers.kv.tables import BlockTables


def test_every_move_is_booked_with_its_reason() -> None:
    ledger = Ledger(4)
    ledger.move((0, 1), BlockState.FREE, BlockState.HELD, Reason.ADMIT)
    ledger.move((1,), BlockState.HELD, BlockState.FREE, Reason.PREEMPT)
    ledger.check()
    assert (ledger.free_blocks, ledger.cached_blocks, ledger.held_blocks) == (3, 0, 1)
    assert ledger.moves_by_reason[(BlockState.FREE, BlockState.HELD, Reason.ADMIT)] == 2
    assert ledger.moves_by_reason[(BlockState.HELD, BlockState.FREE, Reason.PREEMPT)] == 1


def test_a_move_from_the_wrong_state_names_block_reason_and_history() -> None:
    ledger = Ledger(4)
    ledger.move((2,), BlockState.FREE, BlockState.HELD, Reason.ADMIT)
    with pytest.raises(
        LedgerDrift, match=r"block 2 should go FREE→HELD \(grow\) but is HELD; last: 2: FREE→HELD \(admit\)"
    ):
        ledger.move((2,), BlockState.FREE, BlockState.HELD, Reason.GROW)


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        Ledger(0)


def test_asking_for_too_much_takes_nothing() -> None:
    pool = BlockPool(3)
    pool.allocate(2, Reason.ADMIT)
    with pytest.raises(OutOfBlocks, match="2 blocks asked for"):
        pool.allocate(2, Reason.GROW)
    assert pool.allocatable_blocks == 1
    pool.check()


def test_the_tail_is_reused_before_the_head() -> None:
    pool = BlockPool(3)
    table = pool.allocate(3, Reason.ADMIT)
    assert pool.release(table, Reason.FINISH) == 3
    assert pool.allocate(2, Reason.ADMIT) == (table[2], table[1])


def test_a_shared_block_is_freed_by_its_last_holder() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1, Reason.ADMIT)
    pool.pin(blocks, Reason.ADMIT)
    assert pool.release(blocks, Reason.FINISH) == 0
    assert pool.allocatable_blocks == 1
    assert pool.release(blocks, Reason.FINISH) == 1
    with pytest.raises(LedgerDrift, match=r"released .* while nobody holds it"):
        pool.release(blocks, Reason.FINISH)
    with pytest.raises(LedgerDrift, match="neither held nor cached"):
        pool.pin(blocks, Reason.ADMIT)


def test_tables_grow_only_when_a_block_is_full() -> None:
    tables = BlockTables(BlockPool(4), block_size=4)
    assert tables.grow("a", 4, Reason.ADMIT) == 1
    first = tables.block_ids("a")
    assert tables.grow("a", 4, Reason.GROW) == 1
    assert tables.grow("a", 5, Reason.GROW) == 2
    assert tables.block_ids("a")[:1] == first
    tables.check()
    assert tables.drop("a", Reason.FINISH) == 2
    assert tables.drop("a", Reason.FINISH) == 0
    assert tables.keys() == ()
    tables.check()


def test_a_reference_that_no_table_explains_is_drift() -> None:
    tables = BlockTables(BlockPool(4), block_size=4)
    tables.grow("a", 4, Reason.ADMIT)
    tables.pool.pin(tables.block_ids("a"), Reason.ADMIT)
    with pytest.raises(LedgerDrift, match="has 2 references, tables name it 1 times"):
        tables.check()
