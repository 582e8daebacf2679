"""What a running cluster leaves on disk, so that `down` and `status` find it: one folder per cluster name.

A file lock, held by the supervisor for its whole life, says whether the cluster is up: the kernel frees it however the
supervisor ends, so a stale state file never looks alive.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from cluster.errors import AlreadyUp
from cluster.processes import Process


@dataclass(frozen=True)
class ClusterState:
    """One cluster as its supervisor describes it. `redis` is without its password; `started_s` is Unix time."""

    name: str
    phase: str
    """`starting`, `ready` or `stopping`."""
    pid: int
    cluster_id: str
    model: str
    model_path: str
    workers: int
    host: str
    grpc_port: int
    http_port: int
    redis: str
    started_s: float
    log: str
    processes: tuple[Process, ...] = ()
    """Everything it has started, to be ended should the supervisor be gone."""
    ray_folder: str = ""
    """Ray's temporary folder, to be removed with it."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> ClusterState:
        known = {name: values[name] for name in cls.__dataclass_fields__}
        return replace(cls(**known), processes=tuple(Process(**entry) for entry in known["processes"]))


class StateFolder:
    """The folder of one cluster name. Only the holder of the lock writes."""

    def __init__(self, root: Path, name: str) -> None:
        self.name = name
        self.path = root / name
        self._lock_path = self.path / "lock"
        self._state_path = self.path / "state.json"
        self._url_path = self.path / "redis-url"

    @property
    def data(self) -> Path:
        """Where the embedded Redis keeps its AOF."""
        return self.path / "redis"

    @property
    def log(self) -> Path:
        return self.path / "headrace.log"

    @property
    def serve_logs(self) -> Path:
        return self.path / "serve-logs"

    def cluster_id(self) -> str:
        """Stays the same over restarts and differs between machines and state folders, which may share one Redis."""
        identity = f"{socket.gethostname()}:{self.path.resolve()}"
        return f"{self.name}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the cluster's lock. Raises `AlreadyUp` if another process does."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._lock_path.open("w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise AlreadyUp(self.already_up()) from error
            yield

    def already_up(self) -> str:
        state = self.read()
        where = f" (pid {state.pid}, gRPC port {state.grpc_port})" if state else ""
        hint = "headrace down" if self.name == "default" else f"headrace down --name {self.name}"
        return f"cluster {self.name!r} is already up{where}; end it with `{hint}` or choose another --name"

    def is_up(self) -> bool:
        """Whether a supervisor lives. Asks with a shared lock: two askers do not disturb each other."""
        try:
            with self._lock_path.open() as handle:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def read(self) -> ClusterState | None:
        """None if there is no state or it is unreadable."""
        try:
            return ClusterState.from_json(json.loads(self._state_path.read_text()))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, state: ClusterState) -> None:
        _write_private(self._state_path, json.dumps(state.to_json(), indent=1) + "\n")

    def read_redis_url(self) -> str | None:
        try:
            return self._url_path.read_text()
        except OSError:
            return None

    def write_redis_url(self, url: str) -> None:
        """Apart from the state, readable by its owner only: it may hold a password that `status` needs."""
        _write_private(self._url_path, url)

    def clear(self) -> None:
        self._state_path.unlink(missing_ok=True)
        self._url_path.unlink(missing_ok=True)


def masked(url: str) -> str:
    """`url` with its password replaced by three stars."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{parts.username or ''}:***@{host}"))


def _write_private(path: Path, text: str) -> None:
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as handle:
        handle.write(text)
    scratch.replace(path)
