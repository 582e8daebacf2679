"""A client, the settings and the CLI's help must not pay for torch, ray or transformers."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "ray", "transformers")


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint('\\n'.join(m.split('.')[0] for m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement", ["import headrace", "from headrace import Client", "import cluster.settings", "import cluster.cli"]
)
def test_loads_nothing_heavy(statement: str) -> None:
    assert modules_after(statement).isdisjoint(HEAVY)


def test_the_client_needs_only_grpc_and_protobuf() -> None:
    loaded = modules_after("from headrace import Client, AsyncClient")
    assert "grpc" in loaded
    assert loaded.isdisjoint({"redis", "msgpack", "tokenizers", "jinja2", "pydantic", "numpy", "fastapi"})


def test_scheduler_and_placement_are_standard_library_only() -> None:
    loaded = modules_after(
        "import workers.scheduler, workers.kv, router.admission, router.placement, headrace.store.interface"
    )
    assert loaded.isdisjoint({*HEAVY, "redis", "grpc", "numpy", "pydantic", "fastapi", "msgpack"})
