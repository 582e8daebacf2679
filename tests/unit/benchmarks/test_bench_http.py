"""Server-sent events, and the HTTP transport against a real server that follows a script."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.drive import Drive
from benchmarks.errors import BenchError, CallFailed
from benchmarks.sse import Event, EventReader
from benchmarks.transports.openai_http import OpenAITransport
from benchmarks.workload import Call, Workload

STREAM = ': hello\r\nid: r:0:0\ndata: {"a": "é"}\n\nevent: x\ndata:1\ndata: 2\n\n\n\ndata: [DONE]\r\n\r\n'
EVENTS = [Event('{"a": "é"}', "r:0:0"), Event("1\n2"), Event("[DONE]")]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, len(STREAM.encode())), max_size=8))
def test_events_do_not_depend_on_how_the_socket_cut_them(cuts: list[int]) -> None:
    raw, reader = STREAM.encode(), EventReader()
    edges = [0, *sorted(cuts), len(raw)]
    pieces = [raw[begin:end] for begin, end in pairwise(edges)]
    assert [event for piece in pieces for event in reader.feed(piece)] == EVENTS


def test_an_event_without_its_blank_line_is_not_one() -> None:
    assert EventReader().feed(b"data: 1\n") == []


def chunk(text: str, **fields: object) -> str:
    return json.dumps({"choices": [{"index": 0, "text": text}], **fields})


def usage(tokens: int) -> str:
    return json.dumps({"choices": [], "usage": {"completion_tokens": tokens}})


class ScriptedServer:
    """Writes each (id, data) of the script only when the client has counted the tokens that the entry asks for."""

    def __init__(self, watcher, script: list[tuple[int, str, str]], status: int = 200) -> None:
        self._watcher, self._script, self._status = watcher, script, status
        self.bodies: list[dict[str, object]] = []
        self.written_s: list[float] = []
        self.models: object = {"data": [{"id": "m"}]}

    async def list_models(self, request: web.Request) -> web.Response:
        return web.json_response(self.models)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        if self._status != 200:
            return web.json_response({"error": {"message": "too busy"}}, status=self._status)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for after_tokens, event_id, data in self._script:
            await self._watcher.until_tokens(after_tokens)
            self.written_s.append(asyncio.get_running_loop().time())
            lines = f"id: {event_id}\n" if event_id else ""
            await response.write(f"{lines}data: {data}\n\n".encode())
        await response.write_eof()
        return response


@asynccontextmanager
async def serving(server: ScriptedServer) -> AsyncIterator[OpenAITransport]:
    app = web.Application()
    app.router.add_get("/v1/models", server.list_models)
    app.router.add_post("/v1/completions", server.complete)
    async with TestServer(app) as running:
        transport = OpenAITransport(str(running.make_url("/")))
        try:
            await transport.open("")
            yield transport
        finally:
            await transport.close()


CALL = Call(0, 0.0, array("I", [1_000, 2_000]), 4)

OWN_IDS = [  # headrace: the id tells the newest token index; half a character sends no chunk of its own
    (0, "r:0:0", chunk("a")),
    (1, "r:0:2", chunk("bc")),
    (3, "r:0:3", chunk("")),
    (4, "", usage(4)),
    (4, "", "[DONE]"),
]
NO_IDS = [  # any other server: a token per chunk with text, and usage for the one that had none
    (0, "", chunk("a", usage=None)),
    (1, "", chunk("b")),
    (2, "", chunk("")),
    (2, "", chunk("c")),
    (3, "", usage(4)),
    (4, "", "[DONE]"),
]


@pytest.mark.parametrize(("script", "deltas"), [(OWN_IDS, [1, 2, 1]), (NO_IDS, [1, 1, 1, 1])], ids=["own", "other"])
async def test_counts_tokens_at_the_writes_of_the_script(watcher, script, deltas: list[int]) -> None:
    server = ScriptedServer(watcher, script)
    async with serving(server) as transport:
        run = Drive(transport, watcher, 30.0)
        [record] = await run.run(Workload((CALL,), CALL, 1))
    assert (record.error, record.output_tokens, record.deltas) == ("", 4, len(deltas))
    times_s = [run.start_s + time_s for time_s in record.token_s]
    assert server.written_s[0] <= times_s[0] <= server.written_s[1]
    assert server.written_s[1] <= times_s[1] <= server.written_s[2] or script is NO_IDS
    assert times_s == sorted(times_s)
    assert len(set(times_s)) <= len(deltas)
    assert server.bodies == [
        {
            "model": "m", "prompt": [1_000, 2_000], "max_tokens": 4, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("script", "status", "kind", "detail"),
    [
        ([], 429, "http_429", "too busy"),
        ([(0, "", '{"error": {"message": "worker lost"}}')], 200, "stream_error", "worker lost"),
        ([(0, "", "not json")], 200, "bad_chunk", "not json"),
        ([(0, "", "[1]")], 200, "bad_chunk", "[1]"),
        ([(0, "", chunk("a"))], 200, "stream_cut", "the stream ended without [DONE]"),
    ],
)
async def test_every_other_end_is_told_by_its_kind(watcher, script, status: int, kind: str, detail: str) -> None:
    async with serving(ScriptedServer(watcher, script, status)) as transport:
        with pytest.raises(CallFailed) as failure:
            async for _ in transport.stream(CALL):
                pass
    assert (failure.value.kind, failure.value.detail) == (kind, detail)


async def test_a_server_that_goes_away_is_a_connection_error(watcher) -> None:
    async with serving(ScriptedServer(watcher, [])) as transport:
        await transport.open("")
        gone = OpenAITransport("http://127.0.0.1:9")
        await gone.open("m")
        with pytest.raises(CallFailed) as failure:
            async for _ in gone.stream(CALL):
                pass
        await gone.close()
    assert failure.value.kind == "connection"


async def test_what_is_no_such_server_is_one_line(watcher) -> None:
    server = ScriptedServer(watcher, [])
    server.models = {"data": []}
    with pytest.raises(BenchError, match="lists no model"):
        async with serving(server):
            pass
    transport = OpenAITransport("http://127.0.0.1:9/v1/")
    with pytest.raises(BenchError, match=r"cannot reach http://127.0.0.1:9/v1/models: .*headrace up"):
        await transport.open("")
    await transport.close()
