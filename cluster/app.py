"""The cluster as Ray Serve applications: routers listen, workers compute; they meet only in the store."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from router.config import RouterConfig
from workers.config import EngineConfig

if TYPE_CHECKING:
    from ray.serve import Application, Deployment

    from cluster.settings import Settings

ROUTER_APP, WORKER_APP = "headrace-router", "headrace-workers"

_HEALTH_PERIOD_S = 5.0
_HEALTH_TIMEOUT_S = 10.0
"""Three misses replace a replica: a hung worker's lease has lapsed long before (3 s), its requests run elsewhere."""
_GRACE_S = 15.0
"""For a replica to hand back its work and leave the board."""
_CONSTRUCTOR_TRIES = 2


@dataclass(frozen=True)
class Composition:
    """All that the applications are made of."""

    engine: EngineConfig
    router: RouterConfig
    workers: int
    gpus_per_worker: int


def compose(
    settings: Settings, *, model_path: str, model_name: str, cluster_id: str, redis_url: str, gpus: int
) -> Composition:
    """`gpus` is how many the cluster has. On a CPU the cores are shared out evenly, at least one thread each."""
    workers = settings.workers or max(1, gpus)
    threads = 0 if gpus else (settings.threads or max(1, available_cores() // workers))
    return Composition(
        engine=settings.engine_config(model_path, model_name, threads=threads),
        router=settings.router_config(model_path, model_name, cluster_id=cluster_id, redis_url=redis_url),
        workers=workers,
        gpus_per_worker=1 if gpus else 0,
    )


def build_app(composition: Composition) -> dict[str, Application]:
    """Serve applications by name, ready for `serve.run`."""
    from router.deployment import Router
    from workers.replica import Worker

    lifecycle: dict[str, Any] = {
        "health_check_period_s": _HEALTH_PERIOD_S,
        "health_check_timeout_s": _HEALTH_TIMEOUT_S,
        "graceful_shutdown_timeout_s": _GRACE_S,
        "graceful_shutdown_wait_loop_s": 0.1,
        "max_constructor_retry_count": _CONSTRUCTOR_TRIES,
    }
    # CPUs are shared by threads, not booked: one core each for router and workers would not fit a small machine.
    router = cast("Deployment", Router).options(num_replicas=1, ray_actor_options={"num_cpus": 0}, **lifecycle)
    worker = cast("Deployment", Worker).options(
        num_replicas=composition.workers,
        ray_actor_options={"num_cpus": 0, "num_gpus": composition.gpus_per_worker},
        **lifecycle,
    )
    config = composition.router
    return {
        WORKER_APP: worker.bind(composition.engine, config.redis_url, config.cluster_id),
        ROUTER_APP: router.bind(config),
    }


def available_cores() -> int:
    """Cores this process may use: its affinity, and the quota of its control group where there is one."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
