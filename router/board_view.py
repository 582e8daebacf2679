"""The board as the router last read it, less what it has sent since; shared by all calls of a moment."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from headrace.errors import HeadraceError
from headrace.store.interface import BoardRow, Store

MAX_AGE_S = 0.05
"""Older than one decode step of a small model: ranking tolerates it, since the store checks credit when it binds."""
PROBE_LIMIT_S = 0.8
"""A probe asks whether there is service now, and by default it is given a second (Kubernetes)."""
SLOWEST_START_S = 5.0
"""When nothing is known of any worker: a client is told to come back after about one start of a small model."""


class BoardView:
    """Reads the board at most every `MAX_AGE_S`, however many callers there are."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._rows: tuple[BoardRow, ...] = ()
        self._read_at_s = -1.0
        self._reading = asyncio.Lock()

    @property
    def last(self) -> tuple[BoardRow, ...]:
        """As last read, however long ago."""
        return self._rows

    async def rows(self) -> tuple[BoardRow, ...]:
        """Raises Unavailable when the store is away."""
        if time.monotonic() - self._read_at_s > MAX_AGE_S:
            async with self._reading:
                if time.monotonic() - self._read_at_s > MAX_AGE_S:
                    self._rows = await self._store.board()
                    self._read_at_s = time.monotonic()
        return self._rows

    def expect(self, worker: str, price_blocks: int) -> None:
        """A request is about to be offered to `worker` first: until the next reading it has that much less credit.

        Without this, a burst that comes within one reading would all go to the worker that was the emptiest before it.
        """
        self._rows = tuple(
            replace(row, credit_blocks=row.credit_blocks - price_blocks) if row.worker == worker else row
            for row in self._rows
        )

    async def live_workers(self) -> int | None:
        """Workers with a live lease; None when the store is away, or takes longer than a probe would wait."""
        try:
            async with asyncio.timeout(PROBE_LIMIT_S):
                return sum(row.lease_left_ms > 0 for row in await self.rows())
        except (HeadraceError, TimeoutError):
            return None
