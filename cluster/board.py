"""What the store says about a cluster: its workers, and how many requests wait and run."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from headrace.store.interface import Audit, BoardRow, Census

_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Board:
    """One look at the store. Only workers with a live lease are listed."""

    workers: tuple[BoardRow, ...]
    census: Census
    audit: Audit


def read_board(redis_url: str, cluster_id: str, model: str) -> Board:
    """Raises `headrace.errors.Unavailable` when the store does not answer."""
    return asyncio.run(_read(redis_url, cluster_id, model))


async def _read(redis_url: str, cluster_id: str, model: str) -> Board:
    from headrace.errors import Unavailable
    from headrace.store.adapter import AsyncRedisStore

    try:
        async with asyncio.timeout(_TIMEOUT_S):
            store = AsyncRedisStore.connect(redis_url, cluster_id, model)
            try:
                rows = await store.board()
                live = tuple(row for row in rows if row.lease_left_ms > 0)
                return Board(live, await store.census(), await store.audit())
            finally:
                await store.close()
    except TimeoutError as error:
        raise Unavailable(f"the store did not answer within {_TIMEOUT_S:.0f} s") from error
