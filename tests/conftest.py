"""Fixtures for all suites: the embedded model's folder and, for tests marked `cluster`, one running cluster."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # read when torch is imported; see workers/model/__init__.py
REPOSITORY = Path(__file__).parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sequences", type=int, default=1_000, help="random call sequences of the store's contract suite")
    parser.addoption("--data", type=Path, help="a file of real JSON schemas, one object with `schema` a line")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's HEADRACE_* and RAY_ADDRESS must not steer the tests; the cache of the model may."""
    for name in list(os.environ):
        if (name.startswith("HEADRACE_") and name != "HEADRACE_CACHE") or name == "RAY_ADDRESS":
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The embedded model as a Hugging Face folder; converted on first use."""
    from cluster.model_cache import resolve_model

    return Path(resolve_model(None).path)


def free_port() -> int:
    """A TCP port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class RunningCluster:
    """One cluster started for the tests: real Ray, real Redis, the real model, two workers."""

    name: str
    state_dir: Path
    grpc_port: int
    http_port: int
    info: dict[str, object]

    @property
    def grpc_address(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def headrace(self, *arguments: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Runs the CLI against this cluster."""
        return run_cli(self.state_dir, *arguments, timeout_s=timeout_s)


def run_cli(state_dir: Path, *arguments: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Runs `headrace` as a user would, with its state in `state_dir`."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_") or k == "HEADRACE_CACHE"}
    environment.pop("RAY_ADDRESS", None)
    environment["HEADRACE_STATE"] = str(state_dir)
    return subprocess.run(
        [sys.executable, "-m", "cluster.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment,
        cwd=REPOSITORY,
        check=False,
    )


def start_cluster(state_dir: Path, *options: str) -> Iterator[RunningCluster]:
    """`headrace up` on free ports with its state in `state_dir`; `headrace down` when the iterator is closed."""
    ports = {"--grpc-port": free_port(), "--http-port": free_port()}
    flags = [text for flag, port in ports.items() for text in (flag, str(port))]
    up = run_cli(state_dir, "up", "--detach", "--json", *options, *flags, timeout_s=240)
    if up.returncode != 0:
        raise RuntimeError(f"headrace up failed ({up.returncode}): {up.stderr[-4000:]} {up.stdout[-2000:]}")
    info = json.loads(up.stdout.strip().splitlines()[-1])
    try:
        yield RunningCluster("default", state_dir, ports["--grpc-port"], ports["--http-port"], info)
    finally:
        down = run_cli(state_dir, "down")
        assert down.returncode == 0, down.stderr


@pytest.fixture(scope="session")
def running_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """Two workers; started once for all tests marked `cluster`, ended by pid at the end."""
    yield from start_cluster(
        tmp_path_factory.mktemp("state"),
        *("--workers", "2", "--dtype", "float32", "--kv-blocks", "640", "--max-context", "2048"),
    )
