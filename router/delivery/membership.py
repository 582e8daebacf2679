"""This router's life in the store: its incarnation, its lease, and the sweep that every router owes the cluster."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from headrace.errors import HeadraceError
from headrace.store.interface import Store, Swept
from headrace.store.keys import incarnation

SWEEP_INTERVAL_S = 0.25
"""DESIGN section 4: often enough that a lapsed lease of 3 s is seen at once, cheap enough for every router."""

log = logging.getLogger(__name__)


class Membership:
    """Renews the lease by sweeping. `on_sweep` hears every sweep, `on_rejoin` a change of incarnation."""

    def __init__(
        self,
        store: Store,
        name: str,
        on_sweep: Callable[[Swept], None],
        on_rejoin: Callable[[], None],
    ) -> None:
        self.router = incarnation(name)
        self.store_away_since_s: float | None = None
        """`time.monotonic` of the first failed call; None while the store answers."""
        self._store = store
        self._name = name
        self._on_sweep = on_sweep
        self._on_rejoin = on_rejoin

    async def join(self) -> None:
        """The first sweep makes the lease. Raises Unavailable when the store is away."""
        swept = await self._store.sweep(self.router)
        if swept.fenced:
            self.router = incarnation(self._name)
            await self._store.sweep(self.router)

    async def run(self) -> None:
        """Sweeps until cancelled; an absent store is waited for."""
        while True:
            started = time.monotonic()
            await self._sweep()
            await asyncio.sleep(max(0.0, SWEEP_INTERVAL_S - (time.monotonic() - started)))

    async def leave(self) -> None:
        """Gives up the lease at once; an absent store will see it lapse instead."""
        try:
            await self._store.leave(self.router)
        except HeadraceError as error:
            log.warning("left without telling the store: %s", error.message)

    async def _sweep(self) -> None:
        try:
            swept = await self._store.sweep(self.router)
            if swept.fenced:
                self.router = incarnation(self._name)
                log.warning("fenced; going on as a new incarnation", extra={"router": self.router})
                # Told before the store is asked again: that call may fail, and nobody else knows of the change.
                self._on_rejoin()
                swept = await self._store.sweep(self.router)
        except HeadraceError as error:
            if self.store_away_since_s is None:
                self.store_away_since_s = time.monotonic()
                log.warning("the store is away: %s", error.message)
            return
        if self.store_away_since_s is not None:
            log.info("the store is back", extra={"away_s": round(time.monotonic() - self.store_away_since_s, 3)})
            self.store_away_since_s = None
        self._on_sweep(swept)
