"""The asyncio client against a real server on the loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from headrace import AsyncClient, errors
from headrace.events import Accepted, Delta, Finished
from headrace.frame import FinishReason
from headrace.wire import ModelInfo


@pytest_asyncio.fixture
async def client(reciter: Any) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(reciter.address) as client:
        yield client


async def test_a_stream_is_its_deltas_in_order(client: AsyncClient) -> None:
    stream = client.generate("héllo")
    assert stream.request_id == ""
    assert await stream.accepted() == Accepted("r-1", 5)
    assert [delta async for delta in stream] == [Delta(0, i, (ord(c),), c) for i, c in enumerate("héllo")]
    assert stream.finished == Finished(0, FinishReason.STOP, 5, 5)
    assert (stream.request_id, await stream.text()) == ("r-1", "héllo")


async def test_chat_models_and_cancel(client: AsyncClient) -> None:
    assert await client.chat([{"role": "user", "content": "hi"}], max_tokens=6).text() == "user:h"
    assert await client.models() == (ModelInfo("reciter", 512),)
    assert await client.cancel("r-1") is True
    with pytest.raises(errors.UnknownRequest):
        await client.cancel("nobody")


async def test_many_streams_at_once_over_two_connections(client: AsyncClient, reciter: Any) -> None:
    texts = [f"stream {i} of fifty" for i in range(50)]
    assert await asyncio.gather(*(client.generate(text).text() for text in texts)) == texts
    assert len(reciter.servicer.peers) == 2


@pytest.mark.parametrize(
    ("prompt", "options", "kind"),
    [
        ("a", {"top_p": 0}, errors.InvalidRequest),
        ("a", {"model": "nope"}, errors.UnknownModel),
        ("busy", {}, errors.Overloaded),
        ("fail", {}, errors.RequestFailed),
        ("break off", {}, errors.Unavailable),
    ],
)
async def test_refusals_and_failures_are_our_errors(
    client: AsyncClient, prompt: str, options: dict[str, Any], kind: type[errors.HeadraceError]
) -> None:
    with pytest.raises(kind):
        await client.generate(prompt, **options).text()


async def test_own_cancel_is_an_error_of_ours(client: AsyncClient, reciter: Any) -> None:
    stream = client.generate("wait")
    assert (await anext(stream)).text == "w"
    stream.cancel()
    with pytest.raises(errors.Cancelled):
        await stream.text()
    assert await asyncio.to_thread(reciter.next_cancelled) == "r-1"


async def test_a_cancelled_task_stays_cancelled_and_cancels_the_request(client: AsyncClient, reciter: Any) -> None:
    stream = client.generate("wait")
    await stream.accepted()
    reader = asyncio.create_task(stream.text())
    await asyncio.sleep(0)  # let it start to read
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert await asyncio.to_thread(reciter.next_cancelled) == "r-1"


async def test_a_time_out_around_the_reader_is_a_time_out(client: AsyncClient, reciter: Any) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await client.generate("wait").text()
    assert await asyncio.to_thread(reciter.next_cancelled) == "r-1"


async def test_leaving_the_block_or_dropping_it_cancels(client: AsyncClient, reciter: Any) -> None:
    async with client.generate("wait") as stream:
        await anext(stream)
    assert await asyncio.to_thread(reciter.next_cancelled) == "r-1"
    dropped = client.generate("wait")
    await anext(dropped)
    del dropped
    assert await asyncio.to_thread(reciter.next_cancelled) == "r-2"


async def test_the_deadline_is_kept(client: AsyncClient) -> None:
    with pytest.raises(errors.DeadlineExceeded):
        await client.generate("wait", timeout_s=0.3).text()
