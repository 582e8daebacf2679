"""Ray and Serve as this cluster uses them: a private instance behind a token of its own, or one that is joined.

Never `ray stop`: it ends every Ray process of the machine. What was started here is ended through Ray, then checked by
pid.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.errors import OperatorError, StartFailed
from cluster.processes import Process, descendants, end_all

if TYPE_CHECKING:
    from ray.serve import Application
    from ray.serve.schema import ServeStatus

NAMESPACE = "headrace"
_OBJECT_STORE_BYTES = 128 << 20
"""Tokens travel through Redis, so Ray's object store carries next to nothing."""
_START_ATTEMPTS = 2
_SLOW_START = "timed out during startup"
"""Ray gives a node 30 s to start, whatever it is told; a machine that is busy with something else may need longer."""
_FOLDER_PREFIX = "headrace-ray-"
_POLL_S = 0.1
_END_GRACE_S = 5.0
_END_ROUNDS = 3
_SERVE_SHUTDOWN_S = 30.0


class RayRuntime:
    """One connection of this process to Ray, with the Serve applications it has deployed."""

    def __init__(self, address: str | None, log_folder: Path) -> None:
        """`address` None: a private instance. `log_folder` receives the replicas' logs."""
        self._address = address
        self._log_folder = log_folder
        self._scratch: Path | None = None
        self._started_serve = False

    @property
    def folder(self) -> str:
        """Ray's temporary folder; "" for a cluster that was joined."""
        return str(self._scratch or "")

    @property
    def is_private(self) -> bool:
        return self._address is None

    def connect(self, *, threads: int, keep: frozenset[Process] = frozenset()) -> None:
        """Starts or joins Ray, then Serve without its own proxies: routers listen themselves.

        `threads` is what a worker on this machine will compute with; `keep` are processes below this one that are not
        Ray's. Raises `StartFailed` or `OperatorError`.
        """
        _prepare_environment(self.is_private, threads)
        for attempt in range(_START_ATTEMPTS):
            try:
                self._initialise()
                break
            except Exception as error:  # Ray raises the base class itself for a node that is slow to start
                if attempt == _START_ATTEMPTS - 1 or _SLOW_START not in str(error):
                    raise StartFailed(f"Ray did not start: {_first_line(str(error))}") from error
                self.shut_down(keep)
        self._start_serve()

    def _initialise(self) -> None:
        import ray

        quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False, "namespace": NAMESPACE}
        if self._address is not None:
            ray.init(address=self._address, **quiet)
            return
        # Ray puts unix sockets below this folder, in paths of up to 107 bytes: it must be short.
        self._scratch = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir="/tmp"))
        ray.init(
            address="local",
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            _temp_dir=str(self._scratch),
            **quiet,
        )

    def _start_serve(self) -> None:
        from ray import serve

        running = {} if self.is_private else _applications_running()
        if running:
            raise OperatorError(
                f"the Ray cluster at {self._address} already runs the Serve application {sorted(running)[0]!r}; "
                "delete it or unset RAY_ADDRESS"
            )
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.start(proxy_location="Disabled", logging_config=self._logging_config())
        self._started_serve = True

    def _logging_config(self) -> dict[str, Any]:
        logs = {"logs_dir": str(self._log_folder)} if self.is_private else {}
        return {"enable_access_log": False, **logs}

    def gpus(self) -> int:
        import ray

        return int(ray.cluster_resources().get("GPU", 0))

    def nodes(self) -> int:
        import ray

        return sum(1 for node in ray.nodes() if node["Alive"])

    def deploy(self, applications: Mapping[str, Application]) -> None:
        """Asks Serve to run them; `wait_running` says when they do."""
        from ray import serve
        from ray.serve.api import RunTarget

        logs = self._logging_config()
        targets = [RunTarget(app, name, None, logs) for name, app in applications.items()]
        serve.run_many(targets, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)

    def wait_running(self, name: str, timeout_s: float, tick: Callable[[], None] = lambda: None) -> None:
        """Returns when every replica of application `name` has been constructed.

        `tick` is called between looks and may raise to give up. Raises `StartFailed` with the replica's own reason.
        """
        from ray import serve

        deadline = time.monotonic() + timeout_s
        while True:
            status = serve.status()
            application = status.applications.get(name)
            state = application.status.value if application is not None else "NOT_STARTED"
            if state == "RUNNING":
                return
            if application is not None and state in ("DEPLOY_FAILED", "UNHEALTHY"):
                print(_messages(status, name), file=sys.stderr, flush=True)  # all of it, for the log
                raise StartFailed(explain(_messages(status, name)))
            if time.monotonic() >= deadline:
                raise StartFailed(f"{name} was not running after {timeout_s:.0f} s: {explain(_messages(status, name))}")
            tick()
            time.sleep(_POLL_S)

    def processes(self) -> dict[Process, str]:
        """What lives below this process, by short name; empty for a cluster that was joined."""
        return {p: name for p, name in descendants(os.getpid()).items() if p.is_alive()} if self.is_private else {}

    def shut_down(self, keep: frozenset[Process] = frozenset()) -> None:
        """Ends the applications, then Ray if it is ours, then by pid what is left of it but for `keep`. Repeatable."""
        with contextlib.suppress(Exception):  # a broken Ray must not keep us from ending its processes
            self._shut_down_serve()
        with contextlib.suppress(Exception):
            import ray

            ray.shutdown()
        # A worker process may be born while its parent ends, hence the look after the end.
        for _ in range(_END_ROUNDS):
            if not (left := self.processes().keys() - keep):
                break
            end_all(left, _END_GRACE_S)
        remove_folder(self.folder)

    def _shut_down_serve(self) -> None:
        if self._started_serve:
            from ray.serve.context import _get_global_client

            client = _get_global_client(raise_if_no_controller_running=False)
            if client is not None:
                client.shutdown(timeout_s=_SERVE_SHUTDOWN_S)
            self._started_serve = False


def remove_folder(folder: str) -> None:
    """Removes a private instance's temporary folder, and no other."""
    if Path(folder).name.startswith(_FOLDER_PREFIX):
        shutil.rmtree(folder, ignore_errors=True)


def _prepare_environment(private: bool, threads: int) -> None:
    """Ray reads these when it is imported, and hands them on to every process it starts."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Ray nices its workers to 15, and with them our engines behind anything else on the machine.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Ray sets this to 1 for actors without booked CPUs, unless it is set.
    os.environ["OMP_NUM_THREADS"] = str(max(1, threads))
    # OpenMP threads that spin while they wait starve the other processes of a small machine (workers/model).
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    if private:
        # Ray listens on every interface, whatever address it is given; a token of our own keeps others out.
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    else:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")


def _applications_running() -> dict[str, Any]:
    from ray import serve

    return dict(serve.status().applications)


def _messages(status: ServeStatus, name: str) -> str:
    application = status.applications.get(name)
    if application is None:
        return ""
    return "\n".join([application.message, *(d.message for d in application.deployments.values())])


_OUT_OF_MEMORY = re.compile(
    r"out of memory|outofmemory|can't allocate|cannot allocate|MemoryError|\bOOM\b", re.IGNORECASE
)
_ERROR_LINE = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:\([\w.]*\))?: (?!Traceback)(.+)$", re.MULTILINE)
"""The last line of a traceback: `package.Name: what happened`."""


def explain(messages: str) -> str:
    """One sentence out of Serve's report of a failed replica: the innermost error, without the traceback."""
    found = [match.group(1).strip() for match in _ERROR_LINE.finditer(messages)]
    why = found[-1] if found else _first_line(messages)
    if _OUT_OF_MEMORY.search(messages):
        return f"out of memory: {why.rstrip('.')}; lower --kv-blocks, --kv-mib, --max-context or --workers"
    return why


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")
