"""The process that owns one cluster: it starts every part in order, watches them, and ends them in the reverse order.

Run as `python -m cluster.supervisor`, with a `Launch` on standard input and the number of a pipe's descriptor as
argument. It lives in a session of its own; SIGTERM or SIGINT ends the cluster. The order of the end is: Serve (workers
hand their work back, routers close), Ray, what is left of Ray by pid, Redis, the state file. All of it happens in the
main thread, whose life Redis shares.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType

from cluster.app import ROUTER_APP, WORKER_APP, Composition, build_app, compose
from cluster.board import read_board
from cluster.embedded_redis import EmbeddedRedis
from cluster.errors import OperatorError, StartFailed
from cluster.launch_order import Launch
from cluster.ports import answers, require_free
from cluster.processes import Process, adopt_orphans, end_all
from cluster.ray_runtime import RayRuntime, remove_folder
from cluster.reporting import Reporter
from cluster.settings import Settings
from cluster.state import ClusterState, StateFolder, masked
from headrace.errors import HeadraceError

_WATCH_S = 0.5
_ROUTER_ANSWERS_S = 20.0
_BOARD_S = 10.0
_STALE_GRACE_S = 5.0
_FAILED, _OPERATOR_ERROR = 1, 2


class StopRequested(BaseException):
    """Raised in the main thread by SIGTERM and SIGINT; no `except Exception` may swallow it."""


class Supervisor:
    """One cluster, from `run` to its return. Not reusable."""

    def __init__(self, launch: Launch, report: Reporter) -> None:
        self._launch = launch
        self._settings = Settings(**launch.settings)
        self._folder = StateFolder(Path(launch.state_root), self._settings.name)
        self._report = report
        self._redis: EmbeddedRedis | None = None
        self._redis_url = ""
        self._ray = RayRuntime(launch.ray_address, self._folder.serve_logs)
        self._deadline_s = time.monotonic() + self._settings.start_timeout_s

    def run(self) -> int:
        """The exit status: 0 after an asked-for end, 1 for a failure of ours, 2 for one the operator can mend."""
        try:
            with self._folder.locked(), self._ended_in_order():
                state = self._start()
                self._report.ready(state.to_json())
                self._watch()
        except (StopRequested, SystemExit):  # the latter where Ray's own SIGTERM handler was in place for a moment
            self._report.failed("stopped before it was ready")
            return 0
        except (OperatorError, HeadraceError) as error:
            self._report.failed(str(error))
            return _OPERATOR_ERROR if isinstance(error, OperatorError) else _FAILED
        return 0

    # ---- start ------------------------------------------------------------------------------------------------------

    def _start(self) -> ClusterState:
        if (stale := self._folder.read()) is not None:  # an earlier supervisor was killed and could not tidy up
            end_all(stale.processes, _STALE_GRACE_S)
            remove_folder(stale.ray_folder)
        state = self._describe()
        self._folder.write(state)
        with self._report.stage("ports"):
            require_free(self._settings.host, self._settings.grpc_port, "--grpc-port")
            require_free(self._settings.host, self._settings.http_port, "--http-port")
        with self._report.stage("redis"):
            self._start_redis()
        with self._report.stage("ray"):
            composition = self._start_ray()
        with self._report.stage("deploy"):
            self._ray.deploy(build_app(composition))
        with self._report.stage(f"{composition.workers} worker{'s' * (composition.workers > 1)}"):
            self._ray.wait_running(WORKER_APP, self._left_s(), self._tick)
            self._wait_on_board(composition.workers)
        with self._report.stage("router"):
            self._ray.wait_running(ROUTER_APP, self._left_s(), self._tick)
            for port in (self._settings.grpc_port, self._settings.http_port):
                if not answers(self._settings.host, port, _ROUTER_ANSWERS_S):
                    raise StartFailed(f"the router runs but port {port} does not answer; see {self._folder.serve_logs}")
        state = replace(
            state,
            phase="ready",
            workers=composition.workers,
            redis=masked(self._redis_url),
            processes=self._processes(),
            ray_folder=self._ray.folder,
        )
        self._folder.write(state)
        return state

    def _describe(self) -> ClusterState:
        settings = self._settings
        return ClusterState(
            name=settings.name,
            phase="starting",
            pid=os.getpid(),
            cluster_id=self._folder.cluster_id(),
            model=self._launch.model_name,
            model_path=self._launch.model_path,
            workers=settings.workers or 0,
            host=settings.host,
            grpc_port=settings.grpc_port,
            http_port=settings.http_port,
            redis=masked(settings.redis or ""),
            started_s=time.time(),
            log=str(self._folder.log),
        )

    def _start_redis(self) -> None:
        if self._settings.redis is None:
            self._redis = EmbeddedRedis(self._folder.data)
            self._redis.start(timeout_s=self._left_s())
            self._redis_url = self._redis.url
        else:
            self._redis_url = self._settings.redis
        from headrace.store.adapter import check_server

        for warning in check_server(self._redis_url).warnings:
            self._report.warning(warning)
        self._folder.write_redis_url(self._redis_url)

    def _start_ray(self) -> Composition:
        first = self._compose(gpus=0)  # only its thread count is needed before Ray has counted the GPUs
        _own_signals()
        self._ray.connect(threads=first.engine.threads, keep=self._redis_processes())
        _own_signals()  # Ray puts its own SIGTERM handler in the place of ours
        if self._redis is not None and self._ray.nodes() > 1:
            raise OperatorError("the Ray cluster has several nodes, which cannot reach an embedded Redis; give --redis")
        return self._compose(self._ray.gpus())

    def _compose(self, gpus: int) -> Composition:
        return compose(
            self._settings,
            model_path=self._launch.model_path,
            model_name=self._launch.model_name,
            cluster_id=self._folder.cluster_id(),
            redis_url=self._redis_url,
            gpus=gpus,
        )

    def _wait_on_board(self, workers: int) -> None:
        """A worker joins the board after it has run a real forward pass."""
        deadline = time.monotonic() + _BOARD_S
        while (found := self._workers_on_board()) < workers:
            if time.monotonic() >= deadline:
                raise StartFailed(f"only {found} of {workers} workers joined; see {self._folder.serve_logs}")
            self._tick()
            time.sleep(0.1)

    def _workers_on_board(self) -> int:
        return len(read_board(self._redis_url, self._folder.cluster_id(), self._launch.model_name).workers)

    def _left_s(self) -> float:
        return max(1.0, self._deadline_s - time.monotonic())

    # ---- watch ------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Returns when an end is asked for. Raises `StartFailed` if Ray itself is gone."""
        raylets = [process for process, name in self._ray.processes().items() if name == "raylet"]
        with contextlib.suppress(StopRequested):
            while not (self._launch.attached and self._report.reader_is_gone()):
                self._tick()
                if not all(raylet.is_alive() for raylet in raylets):
                    raise StartFailed(f"Ray has ended unexpectedly; see {self._folder.log}")
                time.sleep(_WATCH_S)

    def _tick(self) -> None:
        """Restarts the embedded Redis on its AOF if it has died; its socket stays where everybody looks for it."""
        if self._redis is not None and not self._redis.is_alive():
            self._report.warning("the embedded Redis died; restarting it on its data")
            self._redis.start()
            if (state := self._folder.read()) is not None:
                self._folder.write(replace(state, processes=self._processes()))

    def _processes(self) -> tuple[Process, ...]:
        return tuple(self._redis_processes() | set(self._ray.processes()))

    def _redis_processes(self) -> frozenset[Process]:
        """None where Redis is somebody else's."""
        return self._redis.processes if self._redis is not None else frozenset()

    # ---- end --------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _ended_in_order(self) -> Iterator[None]:
        """Whatever happens inside, everything that was started is ended after it."""
        try:
            yield
        finally:
            _ignore_signals()
            if (state := self._folder.read()) is not None:
                self._folder.write(replace(state, phase="stopping"))
            self._ray.shut_down(keep=self._redis_processes())
            if self._redis is not None:
                self._redis.stop()
            self._folder.clear()


def _raise_stop(number: int, frame: FrameType | None) -> None:
    _ignore_signals()  # one request is enough: a second one must not interrupt the end
    raise StopRequested


def _own_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _raise_stop)


def _ignore_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def main() -> int:
    adopt_orphans()
    _own_signals()
    launch = Launch.from_json(sys.stdin.read())
    return Supervisor(launch, Reporter(int(sys.argv[1]))).run()


if __name__ == "__main__":
    sys.exit(main())
