"""One HTTP exchange over ASGI: a bounded body in, a response or events out, and notice of a client that goes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine

from starlette.types import Receive, Scope, Send

from headrace.errors import BodyTooLarge, InvalidRequest

MAX_DISCARDED_BYTES = 1 << 30
MAX_DISCARD_S = 4.0
"""How much of an oversized body is read and thrown away so that its sender, still writing, gets to see the refusal."""
MAX_BODY_S = 60.0
"""A client that sends its body more slowly than this is not waited for."""
MAX_REQUEST_ID_CHARS = 128


class ClientGone(Exception):
    """The client closed the connection: nobody is left to answer."""


class BodyTooSlow(Exception):
    """The body did not arrive in time; HTTP's 408."""


async def read_body(receive: Receive, limit: int) -> bytes:
    """The whole body, within `MAX_BODY_S`.

    Raises BodyTooLarge without keeping more than `limit` bytes, ClientGone when it is cut short, BodyTooSlow.
    """
    try:
        async with asyncio.timeout(MAX_BODY_S):
            return await _read_body(receive, limit)
    except TimeoutError:
        raise BodyTooSlow from None


async def _read_body(receive: Receive, limit: int) -> bytes:
    chunks: list[bytes] = []
    size, started_s = 0, time.monotonic()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        more = bool(message.get("more_body", False))
        size += len(message["body"])
        if size <= limit:
            chunks.append(message["body"])
            continue
        chunks.clear()
        if size > MAX_DISCARDED_BYTES or time.monotonic() - started_s > MAX_DISCARD_S:
            break
    if size > limit:
        raise BodyTooLarge(f"the body is larger than {limit} bytes")
    return b"".join(chunks)


def client_request_id(scope: Scope) -> str:
    """X-Request-Id, for the log only. Raises InvalidRequest for one that is long or not printable ASCII."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            return checked_request_id(value)
    return ""


def checked_request_id(value: bytes) -> str:
    """Raises InvalidRequest unless it is 1 to 128 printable ASCII characters."""
    if not 1 <= len(value) <= MAX_REQUEST_ID_CHARS or any(not 32 <= byte < 127 for byte in value):
        raise InvalidRequest(
            f"x-request-id must be 1 to {MAX_REQUEST_ID_CHARS} printable ASCII characters", field="x-request-id"
        )
    return value.decode("ascii")


async def until_disconnect(receive: Receive, work: Coroutine[object, object, None]) -> None:
    """Runs `work`, cancelling it as soon as the client goes; also in a queue, where nothing is being sent."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def respond(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


class EventStream:
    """Server-sent events. The status line goes out with the first `open`; nothing can be refused after it."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.opened = False

    async def open(self, headers: list[tuple[bytes, bytes]]) -> None:
        self.opened = True
        fixed = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            # nginx would collect the events otherwise.
            (b"x-accel-buffering", b"no"),
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": [*fixed, *headers]})

    async def event(self, data: str, event_id: str = "") -> None:
        head = f"id: {event_id}\n" if event_id else ""
        body = f"{head}data: {data}\n\n".encode()
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def close(self) -> None:
        await self._send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})
