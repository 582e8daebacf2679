"""The import rule of docs/architecture.md, read off the sources, imports inside functions included."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("headrace", "workers", "router", "cluster", "benchmarks")
PURE = ("workers/scheduler", "workers/kv", "router/admission", "router/placement", "headrace/store")
ADAPTER = "headrace/store/adapter.py"
HOMES = {
    "torch": ("workers/model/", "workers/attention/", "workers/sampling/", "benchmarks/"),
    "transformers": ("workers/model/", "workers/attention/"),
    "ray": ("workers/replica.py", "router/deployment.py", "cluster/", "benchmarks/"),
    "redis": (ADAPTER, "cluster/"),
}
"""Library → where it may be imported, by path."""


def sources() -> list[str]:
    found = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def imported(path: str) -> set[str]:
    """Full names of the modules that a file imports, those for type checkers aside."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def zone_of(path: str) -> str:
    """ "" outside of the pure zones."""
    return next((zone for zone in PURE if path.startswith(f"{zone}/") and path != ADAPTER), "")


def test_the_zones_have_files() -> None:
    for zone in PURE:
        assert [path for path in sources() if path.startswith(f"{zone}/")], zone


@pytest.mark.parametrize("path", [path for path in sources() if zone_of(path)])
def test_pure_zones_import_the_standard_library_and_the_contract_only(path: str) -> None:
    own = zone_of(path).replace("/", ".")
    strangers = {
        name for name in imported(path) if name.partition(".")[0] not in {"headrace", *sys.stdlib_module_names}
    }
    assert {name for name in strangers if not name.startswith(own)} == set()


@pytest.mark.parametrize("library", HOMES)
def test_heavy_libraries_stay_at_home(library: str) -> None:
    users = [path for path in sources() if library in {name.partition(".")[0] for name in imported(path)}]
    assert users
    assert [path for path in users if not path.startswith(HOMES[library])] == []
