"""The worker as a Serve replica: one engine, one link, health by forward progress. Only this file of the package knows
Ray."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from ray import serve

from headrace.errors import HeadraceError
from headrace.logs import configure_logs
from headrace.store.adapter import SyncRedisStore
from headrace.store.interface import LEASE_MS
from headrace.store.keys import incarnation
from headrace.tokenizer import Tokenizer
from workers.config import EngineConfig
from workers.engine import Engine
from workers.link import STEP_LIMIT_FACTOR, Link
from workers.model.loader import load_runner
from workers.scheduler.step_time import StepTime

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class WorkerReady:
    """Told once at start. Times in seconds."""

    incarnation: str
    load_s: float
    warm_up_s: float
    total_blocks: int
    block_size: int
    max_context: int
    numerics: str


@serve.deployment(name="worker", max_ongoing_requests=1_000)
class Worker:
    """Takes its work from the store, never from a Serve handle: the handle only asks whether it is ready."""

    async def __init__(self, config: EngineConfig, redis_url: str, cluster_id: str) -> None:  # type: ignore[misc]
        configure_logs()
        replica = serve.get_replica_context().replica_id.unique_id
        self._name = f"worker-{replica[:8]}"
        self._progress = (0, time.monotonic())
        """Iterations at the last health check that saw progress, and when that was."""
        self._ready = await asyncio.to_thread(self._start, config, redis_url, cluster_id)

    def _start(self, config: EngineConfig, redis_url: str, cluster_id: str) -> WorkerReady:
        began = time.monotonic()
        runner = load_runner(config)
        loaded = time.monotonic()
        step_time = StepTime()
        longest_step_s = runner.warm_up(config.chunk_tokens, step_time.measured)
        warmed = time.monotonic()
        self._engine = Engine(runner, config, Tokenizer.load(config.model_path), step_time=step_time)
        connect = SyncRedisStore.connect
        self._link = Link(
            self._engine,
            connect(redis_url, cluster_id, config.model_name),
            connect(redis_url, cluster_id, config.model_name),
            lambda: incarnation(self._name),
            step_limit_s=STEP_LIMIT_FACTOR * longest_step_s,
        )
        self._engine.start()
        self._link.start()
        if not self._link.wait_joined(JOIN_TIMEOUT_S):
            raise HeadraceError(f"the store did not accept {self._name} within {JOIN_TIMEOUT_S:.0f} s")
        load = self._engine.load()
        logger.info("worker %s ready: %d blocks of %d", self._link.incarnation, load.total_blocks, load.block_size)
        return WorkerReady(
            incarnation=self._link.incarnation,
            load_s=loaded - began,
            warm_up_s=warmed - loaded,
            total_blocks=load.total_blocks,
            block_size=load.block_size,
            max_context=load.max_context,
            numerics=load.numerics,
        )

    async def ready(self) -> WorkerReady:
        return self._ready

    async def check_health(self) -> None:
        """Raises when a loop has ended, or there is work and no iteration for the step limit and a lease."""
        if not self._engine.alive:
            raise HeadraceError("the engine's loop has ended")
        if not self._link.alive:
            raise HeadraceError("a loop of the link has ended")
        now, iterations = time.monotonic(), self._engine.load().iterations
        idle_or_paused = self._engine.oldest_runnable_age_s() == 0.0
        if idle_or_paused or iterations != self._progress[0]:
            self._progress = (iterations, now)
        elif now - self._progress[1] > self._link.step_limit_s + LEASE_MS / 1000:
            raise HeadraceError(
                f"no iteration was completed for {now - self._progress[1]:.0f} s although there is work"
            )

    async def __del__(self) -> None:
        link, engine = getattr(self, "_link", None), getattr(self, "_engine", None)
        if link is not None:
            await asyncio.to_thread(link.stop)
        if engine is not None:
            await asyncio.to_thread(engine.stop, 5.0)
