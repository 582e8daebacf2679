"""The HTTP listener: uvicorn on the router's own event loop and on a port that routers of one node share (ADR 0003)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from headrace.errors import HeadraceError
from router.config import RouterConfig

MAX_HEAD_BYTES = 64 << 10
"""Request line and headers together."""
LINGER_S = 1.0
BACKLOG = 2048
KEEP_ALIVE_S = 75
"""Longer than the idle limit of common proxies, so that they close first and never race with our close."""


class _Config(uvicorn.Config):
    stall_limit_s: float


class _Protocol(H11Protocol):
    """Tells a request that is not HTTP, or whose head is too long, so in the shape of every other error; does not wait
    for ever for a client that reads nothing.
    """

    config: _Config
    _refused = False
    _stall: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        """The client takes less than is written for it: from here on the response waits."""
        super().pause_writing()
        self._watch(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unwatch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def _watch(self, waiting: int) -> None:
        self._stall = self.loop.call_later(self.config.stall_limit_s, self._end_if_stalled, waiting)

    def _unwatch(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _end_if_stalled(self, waiting: int) -> None:
        """Ends the connection of a client that took nothing for the stall limit; the exchange sees it as gone."""
        left = self.transport.get_write_buffer_size()
        if left < waiting:
            self._watch(left)
        else:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            super().data_received(data)

    def send_400_response(self, msg: str) -> None:
        message = f"this is not a request that can be read: bad HTTP, or a head of more than {MAX_HEAD_BYTES} bytes"
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        body = json.dumps({"error": error}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        response = h11.Response(status_code=400, headers=[*headers, (b"connection", b"close")], reason=b"Bad Request")
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        # Closing while the client still writes would reset the connection, and the answer with it.
        self._refused = True
        self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to whoever owns the process; this server is stopped by `HttpServer.stop`."""
        yield


class HttpServer:
    """Start, then stop; `port` is the real one also where 0 was asked for."""

    def __init__(
        self, app: ASGIApp, host: str, port: int, *, stall_limit_s: float = RouterConfig.stall_limit_s
    ) -> None:
        """A client that takes nothing of what waits for it loses its connection after `stall_limit_s`."""
        self._socket = _listening_socket(host, port)
        self.port: int = self._socket.getsockname()[1]
        config = _Config(
            app,
            http=_Protocol,
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        )
        config.stall_limit_s = stall_limit_s
        self._config = config
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when connections are accepted."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
                raise HeadraceError("the HTTP server ended while it started")
            await asyncio.sleep(0.005)

    async def stop(self, grace_s: float) -> None:
        """Closes the listener at once, idle connections with it; streams get `grace_s` to end."""
        self._config.timeout_graceful_shutdown = max(1, round(grace_s))
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving
        self._socket.close()


def _listening_socket(host: str, port: int) -> socket.socket:
    """Raises HeadraceError in one sentence when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind((host, port))
    except OSError as error:
        made.close()
        raise HeadraceError(f"cannot listen for HTTP on {host}:{port}: {error.strerror}") from error
    made.setblocking(False)
    return made
