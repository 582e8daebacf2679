"""The router as a Serve replica: one service and its two listeners. The only file of this package that knows Ray.

Serve starts, places, scales and heals it; no request passes through a Serve handle or proxy (ADR 0003).
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from ray import serve

from headrace.chat_template import ChatTemplate
from headrace.errors import HeadraceError
from headrace.logs import configure_logs
from headrace.store.adapter import AsyncRedisStore
from headrace.store.interface import Store
from headrace.tokenizer import Tokenizer
from router.config import RouterConfig
from router.ingress.grpc_server import GrpcServer
from router.ingress.http_server import HttpServer
from router.ingress.openai_http import build_app
from router.service import RouterService

MOVED_NOTICE_S = 1.0
"""After the drain: for streams that were told "moved" to reach their clients before the connections close."""


@dataclass(frozen=True)
class RouterReady:
    """Told once at start. Ports are the real ones; times in seconds."""

    grpc_port: int
    http_port: int
    load_s: float
    join_s: float


@serve.deployment(name="router", max_ongoing_requests=1_000)
class Router:
    """Listens by itself; the handle only asks whether it is ready."""

    async def __init__(self, config: RouterConfig) -> None:  # type: ignore[misc]
        configure_logs()
        began = time.monotonic()
        tokenizer = await asyncio.to_thread(Tokenizer.load, config.model_path)
        template = await asyncio.to_thread(ChatTemplate.load, config.model_path)
        loaded = time.monotonic()
        self._store: Store = AsyncRedisStore.connect(config.redis_url, config.cluster_id, config.model_name)
        self._service = RouterService(config, self._store, tokenizer, template)
        await self._service.start()
        self._grpc = GrpcServer(self._service, config.host, config.grpc_port)
        self._http = HttpServer(
            build_app(self._service), config.host, config.http_port, stall_limit_s=config.stall_limit_s
        )
        await self._grpc.start()
        await self._http.start()
        self._warming = asyncio.ensure_future(self._service.warm())
        self._ready = RouterReady(self._grpc.port, self._http.port, loaded - began, time.monotonic() - loaded)

    async def ready(self) -> RouterReady:
        return self._ready

    async def check_health(self) -> None:
        """Raises when a delivery loop has ended: only a restart helps then. An absent store is not its fault."""
        if not self._service.alive:
            raise HeadraceError("a delivery loop has ended")

    async def __del__(self) -> None:
        """Listeners close first, so that new connections go to another router; then open streams run on for a while."""
        if not hasattr(self, "_ready"):
            return
        grace_s = self._service.config.drain_s + MOVED_NOTICE_S
        closing = asyncio.gather(self._grpc.stop(grace_s), self._http.stop(grace_s))
        await self._service.drain()
        await self._service.stop()
        await closing
        await self._store.close()
