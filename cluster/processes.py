"""Processes by identity (pid and start time: a reused pid is never mistaken), their descendants, and their end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_POLL_S = 0.05
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass(frozen=True)
class Process:
    """One life of one process. `start_ticks` is its start time since boot in clock ticks, as the kernel counts."""

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> Process | None:
        stat = _stat(pid)
        return None if stat is None else cls(pid, stat.start_ticks)

    def is_alive(self) -> bool:
        """False for a zombie: it has ended and only waits to be reaped."""
        stat = _stat(self.pid)
        return stat is not None and stat.start_ticks == self.start_ticks and stat.state not in "ZX"

    def send(self, number: signal.Signals) -> None:
        if self.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


@dataclass(frozen=True)
class _Stat:
    name: str
    state: str
    parent: int
    start_ticks: int


def _stat(pid: int) -> _Stat | None:
    """Reads /proc/<pid>/stat; the name in it may hold spaces and brackets, so fields count from the last bracket."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    head, _, rest = text.rpartition(")")
    fields = rest.split()
    return _Stat(head.partition("(")[2], fields[0], int(fields[1]), int(fields[19]))


def descendants(pid: int) -> dict[Process, str]:
    """All living processes below `pid`, each with its short name."""
    children: dict[int, list[tuple[Process, str]]] = defaultdict(list)
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (stat := _stat(int(entry))) is not None:
            children[stat.parent].append((Process(int(entry), stat.start_ticks), stat.name))
    found: dict[Process, str] = {}
    frontier = [pid]
    while frontier:
        for process, name in children.pop(frontier.pop(), ()):
            found[process] = name
            frontier.append(process.pid)
    return found


def wait_gone(processes: Iterable[Process], timeout_s: float) -> tuple[Process, ...]:
    """Those still alive after at most `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        alive = tuple(process for process in processes if process.is_alive())
        if not alive or time.monotonic() >= deadline:
            return alive
        time.sleep(_POLL_S)


def end_all(processes: Iterable[Process], grace_s: float) -> None:
    """SIGTERM, then SIGKILL to what is left after `grace_s`; returns when none is alive."""
    alive = tuple(process for process in processes if process.is_alive())
    for process in alive:
        process.send(signal.SIGTERM)
    for process in wait_gone(alive, grace_s):
        process.send(signal.SIGKILL)
    wait_gone(alive, grace_s)


def die_with_parent() -> None:
    """For a child between fork and exec: the kernel sends it SIGTERM when the thread that started it ends.

    So not even `kill -9` of the parent leaves it behind.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def adopt_orphans() -> None:
    """Makes this process the parent of whatever its descendants leave behind, so that `descendants` misses nothing."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
