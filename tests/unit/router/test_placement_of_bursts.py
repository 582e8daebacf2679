"""Calls that share one reading of the board still spread over the workers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from headrace.sampling import SamplingParams
from headrace.store.keys import incarnation
from headrace.store.twin import Twin
from headrace.store.twin_store import SyncTwinStore
from headrace.tokenizer import Tokenizer
from router.admission.call import Call, TextPrompt


@pytest.fixture
def second_reciter(twin: Twin, tokenizer: Tokenizer, reciter: Any) -> Iterator[Any]:
    made = type(reciter)(SyncTwinStore(twin), tokenizer)
    made.worker = incarnation("second")
    made.start()
    yield made
    made.stop()


async def test_a_burst_is_shared_by_equally_empty_workers(second_reciter: Any, rig: Any) -> None:
    workers = (rig.reciter, second_reciter)
    for worker in workers:
        worker.hold()
    calls = [Call("", TextPrompt("a burst"), SamplingParams(max_tokens=20)) for _ in range(8)]
    async with AsyncExitStack() as streams:
        for stream in await asyncio.gather(*map(rig.service.submit, calls)):
            await streams.enter_async_context(stream)
        await rig.until(lambda: sum(len(worker.seen) for worker in workers) == len(calls))
    assert min(len(worker.seen) for worker in workers) >= 3, [len(worker.seen) for worker in workers]
    await rig.idle()
