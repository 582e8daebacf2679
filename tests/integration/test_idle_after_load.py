"""Many streams at once, and clients that go away: everything ends and nothing stays behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import httpx
import pytest

from cluster.state import StateFolder
from headrace import AsyncClient
from headrace.store.adapter import AsyncRedisStore
from tests.conftest import RunningCluster
from tests.integration.idle import assert_idle

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(420)]

MODEL = "SmolLM2-135M-Instruct"
LEAST_WORTH = 20
"""Tokens of a second on a machine that does something else too: a rate measured in a slow moment is no bound."""


async def test_two_hundred_streams_at_once(running_cluster) -> None:
    async with AsyncClient(running_cluster.grpc_address) as client:

        async def one(i: int) -> tuple[int, int, str]:
            stream = client.generate(
                f"Item number {i}:", max_tokens=8 + i % 9, temperature=0.8, seed=i, ignore_eos=True
            )
            indices = [d.first_index + k async for d in stream for k in range(len(d.token_ids))]
            assert indices == list(range(8 + i % 9)), "every token index once and in order"
            return i, len(indices), await stream.text()

        done = await asyncio.gather(*(one(i) for i in range(200)))
        assert [n for _, n, _ in done] == [8 + i % 9 for i in range(200)]
        again = [await one(i) for i in (0, 57, 199)]
    assert again == [done[0], done[57], done[199]], "a seeded stream does not depend on its neighbours"
    assert_idle(running_cluster)


BODY = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 1900, "ignore_eos": True}


@asynccontextmanager
async def over_grpc(cluster: RunningCluster) -> AsyncIterator[None]:
    async with AsyncClient(cluster.grpc_address) as client:
        stream = client.generate(BODY["prompt"], max_tokens=1900, ignore_eos=True)
        await anext(stream)
        yield
        stream.close()


@asynccontextmanager
async def over_http_streamed(cluster: RunningCluster) -> AsyncIterator[None]:
    async with (
        httpx.AsyncClient(base_url=cluster.base_url, timeout=60) as http,
        http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as reply,
    ):
        lines = reply.aiter_lines()
        assert (await anext(lines)).startswith(("id: ", "data: "))
        yield
        await lines.aclose()


@asynccontextmanager
async def over_http_whole(cluster: RunningCluster) -> AsyncIterator[None]:
    async with httpx.AsyncClient(base_url=cluster.base_url, timeout=60) as http:
        call = asyncio.create_task(http.post("/v1/completions", json=BODY))
        yield
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)


async def tokens_made(store: AsyncRedisStore) -> int:
    """By all workers so far, as their last reports say."""
    return sum(row.load.output_tokens_total for row in await store.board())


async def when_made(store: AsyncRedisStore, count: int) -> tuple[int, float]:
    """Waits until that many tokens are made; how many there are then, and when that is, in seconds."""
    async with asyncio.timeout(60):
        while (made := await tokens_made(store)) < count:
            await store.deliveries("nobody", "0-0", 20)
    return made, time.monotonic()


@pytest.mark.parametrize("opened", [over_grpc, over_http_streamed, over_http_whole])
async def test_a_client_that_goes_away_cancels(
    running_cluster: RunningCluster, opened: Callable[[RunningCluster], AbstractAsyncContextManager[None]]
) -> None:
    """The request would run for 1,900 tokens; after its client has gone it makes no more than one second's worth."""
    folder = StateFolder(running_cluster.state_dir, running_cluster.name)
    store = AsyncRedisStore.connect(folder.read_redis_url() or "", folder.cluster_id(), MODEL)
    before = await tokens_made(store)
    async with opened(running_cluster):
        first, first_s = await when_made(store, before + 5)
        closed_at, closed_s = await when_made(store, first + 25)
    assert_idle(running_cluster)
    after = await tokens_made(store)
    await store.close()
    a_seconds_worth = (closed_at - first) / (closed_s - first_s)
    assert after - closed_at <= max(a_seconds_worth, LEAST_WORTH) + 1, "it went on although nobody was there"


async def test_explicit_cancel_ends_the_stream_with_its_reason(running_cluster) -> None:
    from headrace.errors import Cancelled

    async with AsyncClient(running_cluster.grpc_address) as client:
        stream = client.generate("Once upon a time", max_tokens=1900, ignore_eos=True)
        taken = 0
        request_id = (await stream.accepted()).request_id

        async def read_and_cancel_after_three() -> None:
            nonlocal taken
            async for delta in stream:
                taken += len(delta.token_ids)
                if taken == 3:
                    assert await client.cancel(request_id)

        with pytest.raises(Cancelled):
            await read_and_cancel_after_three()
        assert taken < 1000
    assert_idle(running_cluster)


async def test_deadline_ends_a_request_wherever_it_is(running_cluster) -> None:
    from headrace.errors import DeadlineExceeded

    async with AsyncClient(running_cluster.grpc_address) as client:
        with pytest.raises(DeadlineExceeded):
            await client.generate("Once upon a time", max_tokens=1900, ignore_eos=True, timeout_s=1.0).text()
    assert_idle(running_cluster)
