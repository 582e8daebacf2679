"""Many streams at once, and clients that go away: everything ends and nothing stays behind."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from headrace import AsyncClient
from tests.integration.idle import assert_idle, cluster_status, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(420)]


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


@pytest.mark.parametrize("way", ["grpc", "http-stream", "http-whole"])
async def test_a_client_that_goes_away_cancels(running_cluster, way: str) -> None:
    """The request would run for 1,900 tokens; it must end soon after its client has gone."""
    body = {"model": "SmolLM2-135M-Instruct", "prompt": "Once upon a time", "max_tokens": 1900, "ignore_eos": True}
    before = sum(w["output_tokens_total"] for w in cluster_status(running_cluster)["workers"])
    if way == "grpc":
        async with AsyncClient(running_cluster.grpc_address) as client:
            stream = client.generate(body["prompt"], max_tokens=1900, ignore_eos=True)
            async for _ in stream:
                break
            stream.close()
    elif way == "http-stream":
        async with (
            httpx.AsyncClient(base_url=running_cluster.base_url, timeout=60) as http,
            http.stream("POST", "/v1/completions", json={**body, "stream": True}) as reply,
        ):
            async for line in reply.aiter_lines():
                if line.startswith("data: "):
                    break
    else:
        async with httpx.AsyncClient(base_url=running_cluster.base_url, timeout=60) as http:
            call = asyncio.create_task(http.post("/v1/completions", json=body))
            until(running_cluster, lambda s: any(w["running"] for w in s["workers"]))
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
    assert_idle(running_cluster)
    after = sum(w["output_tokens_total"] for w in cluster_status(running_cluster)["workers"])
    assert after - before < 1000, "it went on although nobody was there"


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
