"""Ranking workers: properties that hold for any board, in milliseconds."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.frame import LoadReport
from headrace.store.interface import BoardRow
from router.placement.choose import PlacementRequest, choose

LOAD = LoadReport(
    seq=1, credit_blocks=0, free_slots=8, free_blocks=0, cached_blocks=0, held_blocks=0, total_blocks=64, block_size=16,
    max_context=512, running=0, waiting=0, uncomputed_tokens=0, step_s=0.0, drain_tokens_per_s=0.0, iterations=0,
    prompt_tokens_total=0, output_tokens_total=0, preemptions_total=0, draining=False, model="m", weight_version="w",
    numerics="n",
)  # fmt: skip
REQUEST = PlacementRequest("m", price_blocks=4, total_tokens=64)


def _row(worker: str, credit: int, *, lease_ms: int = 500, **load: object) -> BoardRow:
    return BoardRow(worker, dataclasses.replace(LOAD, **load), "0-0", credit, lease_ms)  # type: ignore[arg-type]


rows = st.builds(
    _row,
    st.text("abc", min_size=1, max_size=3),
    st.integers(0, 12),
    lease_ms=st.sampled_from((0, 500)),
    draining=st.booleans(),
    model=st.sampled_from(("m", "m", "other")),
    weight_version=st.sampled_from(("w", "w2")),
    uncomputed_tokens=st.integers(0, 3),
    total_blocks=st.sampled_from((2, 64)),
)
boards = st.lists(rows, max_size=8, unique_by=lambda row: row.worker)


@settings(max_examples=200, deadline=None)
@given(boards, st.randoms(use_true_random=False))
def test_order_of_the_board_does_not_matter(board: list[BoardRow], random: object) -> None:
    shuffled = list(board)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert choose(board, REQUEST) == choose(shuffled, REQUEST)


@settings(max_examples=200, deadline=None)
@given(boards, st.sampled_from((None, "w")))
def test_offers_exactly_the_workers_that_could_run_it(board: list[BoardRow], version: str | None) -> None:
    chosen = choose(board, dataclasses.replace(REQUEST, weight_version=version))
    able = {
        row.worker
        for row in board
        if row.lease_left_ms > 0
        and not row.load.draining
        and row.load.model == "m"
        and row.load.total_blocks * row.load.block_size >= 64
        and version in (None, row.load.weight_version)
    }
    assert set(chosen) == able
    assert len(chosen) == len(able)


@settings(max_examples=200, deadline=None)
@given(boards)
def test_nobody_without_enough_credit_comes_before_somebody_with_it(board: list[BoardRow]) -> None:
    credit = {row.worker: row.credit_blocks for row in board}
    enough = [credit[worker] >= REQUEST.price_blocks for worker in choose(board, REQUEST)]
    assert enough == sorted(enough, reverse=True)


def test_most_credit_left_then_least_backlog_then_name() -> None:
    board = [
        _row("busy", 9, uncomputed_tokens=70),
        _row("b", 9, uncomputed_tokens=5),
        _row("a", 9, uncomputed_tokens=5),
        _row("full", 1),
        _row("most", 10, uncomputed_tokens=900),
    ]
    assert choose(board, REQUEST) == ("most", "a", "b", "busy", "full")


def test_an_empty_board_has_no_candidates() -> None:
    assert choose((), REQUEST) == ()
