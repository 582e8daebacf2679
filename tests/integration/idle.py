"""What `headrace status` says of a cluster, and the check that nothing was left behind."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from tests.conftest import RunningCluster


def cluster_status(cluster: RunningCluster) -> dict:
    done = cluster.headrace("status", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def until(cluster: RunningCluster, holds: Callable[[dict], bool], timeout_s: float = 20.0) -> dict:
    """Polls `status` until it holds; every poll is a process of its own, so this does not spin."""
    deadline = time.monotonic() + timeout_s
    while True:
        status = cluster_status(cluster)
        if holds(status) or time.monotonic() > deadline:
            return status


def is_idle(status: dict) -> bool:
    workers = status["workers"]
    return (
        status["waiting"] == 0
        and all(w["running"] == w["waiting"] == w["held_blocks"] == 0 for w in workers)
        and all(w["free_blocks"] + w["cached_blocks"] + w["held_blocks"] == w["total_blocks"] for w in workers)
    )


def assert_idle(cluster: RunningCluster) -> None:
    """Running, waiting and held come to zero in time; every block is accounted for; no key is left over."""
    status = until(cluster, is_idle)
    assert is_idle(status), status
    assert status["stray_keys"] == 0, status
