"""Starts a supervisor as a process of its own and ends one, from the outside."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cluster.launch_order import Launch
from cluster.processes import Process, end_all, wait_gone
from cluster.ray_runtime import remove_folder
from cluster.reporting import Event, read_events
from cluster.state import ClusterState, StateFolder

_END_S = 75.0
"""More than an orderly end may take: Serve 30 s, Ray's processes twice 5 s, Redis 10 s."""
_POLL_S = 0.05


@dataclass(frozen=True)
class RunningSupervisor:
    """A supervisor this process has started. `events` ends when the supervisor does, or has detached."""

    process: subprocess.Popen[bytes]
    events: Iterator[Event]

    def end(self) -> None:
        """Asks it to end its cluster and waits until it has."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)


@contextmanager
def supervisor(launch: Launch, folder: StateFolder) -> Iterator[RunningSupervisor]:
    """Starts one in its own session, with its log in the state folder. Leaving the context does not end it."""
    folder.path.mkdir(parents=True, exist_ok=True, mode=0o700)
    read_end, write_end = os.pipe()
    try:
        with folder.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "cluster.supervisor", str(write_end)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=(write_end,),
            )
    finally:
        os.close(write_end)
    with os.fdopen(read_end) as stream:
        assert process.stdin is not None
        # Over standard input and not as an argument: the settings may hold a password, and arguments are public.
        # One that has died already reads nothing; its events then end at once, and whoever follows them says why.
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(launch.to_json().encode())
        yield RunningSupervisor(process, read_events(stream))


def end_cluster(folder: StateFolder) -> ClusterState | None:
    """Ends the cluster of `folder`, if any, and everything it has started; returns what it was. Safe to repeat.

    The supervisor does it in order. If it is gone, or does not end in time, its processes are ended by their identity.
    """
    state = _state_of_running(folder)
    if state is None:
        return None
    process = Process.of(state.pid)
    if folder.is_up() and process is not None:
        process.send(signal.SIGTERM)
        if wait_gone([process], _END_S):
            process.send(signal.SIGKILL)
            wait_gone([process], 5.0)
    end_all(state.processes, 5.0)
    remove_folder(state.ray_folder)
    if not folder.is_up():
        folder.clear()
    return state


def _state_of_running(folder: StateFolder) -> ClusterState | None:
    """The state; waited for, for an instant, if a supervisor has just taken the lock and not yet written it."""
    deadline = time.monotonic() + 2.0
    while (state := folder.read()) is None and folder.is_up() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return state
