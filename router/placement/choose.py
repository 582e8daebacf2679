"""Which workers a request should be offered to, best first.

A pure function of the board as the router last saw it. The store binds the first candidate that has credit *then*, so a
stale board costs a worse rank, never a wrong binding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headrace.store.interface import BoardRow


@dataclass(frozen=True)
class PlacementRequest:
    """What placement needs to know of a request."""

    model: str
    price_blocks: int
    total_tokens: int
    """Prompt + `max_tokens` of every choice: a worker whose pool is smaller can never hold it."""
    weight_version: str | None = None
    """None: any will do, since nothing of it has been computed."""
    span_tokens: int | None = None
    """Prompt + `max_tokens` of one choice, which the context must hold; None: `total_tokens`."""


def choose(board: Iterable[BoardRow], request: PlacementRequest) -> tuple[str, ...]:
    """Worker incarnations that could run it, best first.

    Those with enough credit come first; then by credit left after the price; then by the smaller prefill backlog; then
    by name, so that equal boards give equal answers.
    """
    eligible = [row for row in board if _can_run(row, request)]
    return tuple(row.worker for row in sorted(eligible, key=lambda row: _rank(row, request)))


def _can_run(row: BoardRow, request: PlacementRequest) -> bool:
    load = row.load
    if row.lease_left_ms <= 0 or load.draining or load.model != request.model:
        return False
    if request.weight_version is not None and load.weight_version != request.weight_version:
        return False
    span = request.total_tokens if request.span_tokens is None else request.span_tokens
    return span <= load.max_context and request.total_tokens <= load.total_blocks * load.block_size


def _rank(row: BoardRow, request: PlacementRequest) -> tuple[bool, int, int, str]:
    left = row.credit_blocks - request.price_blocks
    return (left < 0, -left, row.load.uncomputed_tokens, row.worker)
