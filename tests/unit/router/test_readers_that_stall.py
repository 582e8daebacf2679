"""A client that keeps its connection open and takes nothing: it loses its place, its request and its connection."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import replace
from typing import Any

import grpc
import pytest

from headrace.events import Delta, Event
from headrace.v1 import inference_pb2 as pb
from headrace.wire import event_to_proto
from router.config import RouterConfig
from router.ingress.openai_render import Rendering

PADDING = "x" * 200_000
"""Put behind each delta's text, so that few events fill what lies between the router and the reader."""


@pytest.fixture
def config(config: RouterConfig) -> RouterConfig:
    return replace(config, stall_limit_s=0.2)


def _longer(delta: Delta, times: int) -> Delta:
    return replace(delta, text=delta.text + times * PADDING)


def _padded(event: Event) -> pb.GenerateEvent:
    return event_to_proto(_longer(event, 1) if isinstance(event, Delta) else event)


async def _assert_it_lost_its_place(rig: Any) -> None:
    """No slot, no request in the worker, nothing in the store, although the client is still connected."""
    await rig.idle()
    [request_id] = rig.reciter.seen
    assert (await rig.store.status(request_id)).finishes == ("cancelled",)
    text = (await rig.http.get("/metrics")).text
    assert 'headrace:requests_total{model_name="reciter",outcome="disconnected"} 1.0' in text


async def _let_it_write(rig: Any) -> None:
    """A token at a time, each as an event of its own, until the writer is held up or the request is cancelled."""
    for _ in range(200):
        if rig.reciter.cancelled_at:
            return
        rig.reciter.hold(after=1)
        await rig.store.deliveries("nobody", "0", 10)


async def test_over_grpc(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.ingress.grpc_server.event_to_proto", _padded)
    monkeypatch.setattr("router.ingress.grpc_server.ABORT_LIMIT_S", 0.2)
    rig.reciter.hold(after=1)
    async with grpc.aio.insecure_channel(rig.grpc_address) as channel:
        sampling = pb.SamplingParams(max_tokens=500, temperature=0)
        request = pb.GenerateRequest(text="x", sampling=sampling).SerializeToString()
        call = channel.unary_stream("/headrace.v1.Inference/Generate")(request)
        await call.read()
        await _let_it_write(rig)
        await _assert_it_lost_its_place(rig)
        with pytest.raises(grpc.aio.AioRpcError, match="took nothing for") as caught:
            await _read_on(call)
        assert caught.value.code() is grpc.StatusCode.CANCELLED


async def _read_on(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_over_http(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    delta = Rendering.delta
    monkeypatch.setattr(Rendering, "delta", lambda self, event: delta(self, _longer(event, 1)))
    rig.reciter.hold(after=1)
    body = json.dumps({"model": "reciter", "prompt": "x", "max_tokens": 500, "stream": True}).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", int(rig.base_url.rsplit(":", 1)[1])))
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        client.sendall(head + body)
        await rig.until(lambda: rig.reciter.seen != [])
        await _let_it_write(rig)
        await _assert_it_lost_its_place(rig)
        client.settimeout(5)
        assert b"[DONE]" not in await asyncio.to_thread(_read_to_the_end, client), "the connection is closed"


def _read_to_the_end(client: socket.socket) -> bytes:
    return b"".join(iter(lambda: client.recv(1 << 20), b""))[-200:]


async def test_one_that_takes_little_but_goes_on_taking_keeps_its_stream(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One chunk is far more than sockets hold and takes longer than the limit, but something is taken all the time."""
    delta = Rendering.delta
    monkeypatch.setattr(Rendering, "delta", lambda self, event: delta(self, _longer(event, 60)))
    body = json.dumps({"model": "reciter", "prompt": "x", "max_tokens": 2, "stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(rig.base_url.rsplit(":", 1)[1]), limit=4096)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    tail, began_s = b"", asyncio.get_running_loop().time()
    while b"[DONE]" not in tail:
        taken = await asyncio.wait_for(reader.read(65_536), 5)
        assert taken, "the connection was closed"
        tail = (tail + taken)[-200:]
        await rig.store.deliveries("nobody", "0", 5)
    assert asyncio.get_running_loop().time() - began_s > 2 * rig.service.config.stall_limit_s
    writer.close()
    await rig.idle()
