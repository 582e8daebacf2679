"""The twin's stores as test doubles: outages on demand, full memory, waking readers."""

from __future__ import annotations

import asyncio
import time

import pytest

from headrace.errors import Unavailable
from headrace.frame import Frame, LoadReport
from headrace.request import Request
from headrace.sampling import SamplingParams
from headrace.store.interface import Admit, Refusal, Refused
from headrace.store.twin import Twin
from headrace.store.twin_store import SyncTwinStore, TwinStore

LOAD = LoadReport(
    1, 50, 4, 50, 0, 0, 50, 16, 512, 0, 0, 0, 0.1, 9.0, 1, 0, 0, 0, False, "model", "v1", "cpu", (("budget", 2),)
)  # fmt: skip
REQUEST = Request("q1", "model", (1, 2), SamplingParams(max_tokens=3, seed=1))


def make_stores() -> tuple[TwinStore, SyncTwinStore]:
    twin = Twin("cluster", "model", lambda: 1_000_000)
    return TwinStore(twin), SyncTwinStore(twin)


async def test_an_absent_store_raises_until_it_is_back() -> None:
    router, link = make_stores()
    router.away = link.away = True
    with pytest.raises(Unavailable):
        link.report("w~1", Frame(LOAD, (), ""))
    with pytest.raises(Unavailable):
        await router.deliveries("r~1", "0-0", 0)
    router.away = link.away = False
    assert not link.report("w~1", Frame(LOAD, (), "")).fenced
    assert (await router.board())[0].load == LOAD


async def test_full_memory_refuses_admission_only() -> None:
    router, link = make_stores()
    router.twin.memory_full = True
    link.report("w~1", Frame(LOAD, (), ""))
    refused = await router.admit(Admit(REQUEST, "r~1", (), 1))
    assert isinstance(refused, Refused)
    assert refused.reason is Refusal.STORE_FULL


async def test_an_inbox_read_ends_as_soon_as_something_comes() -> None:
    router, link = make_stores()
    link.report("w~1", Frame(LOAD, (), ""))
    started = time.monotonic()
    reading = asyncio.create_task(asyncio.to_thread(link.inbox, "w~1", "", 20_000))
    await router.admit(Admit(REQUEST, "r~1", ("w~1",), 1))
    entries = await reading
    assert [entry.bound.request if entry.bound else None for entry in entries] == [REQUEST]
    assert time.monotonic() - started < 10
    assert link.inbox("w~1", entries[-1].id, 1) == ()
