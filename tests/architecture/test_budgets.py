"""The code stays readable in an evening: small files, small functions."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("headrace", "workers", "router", "cluster", "benchmarks")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
GENERATED = ("_pb2.py", "_pb2_grpc.py")


def sources() -> list[Path]:
    found = [p for package in PACKAGES for p in sorted((ROOT / package).rglob("*.py"))]
    return [p for p in found if not p.name.endswith(GENERATED)]


def test_there_are_sources_to_measure() -> None:
    assert len(sources()) > 30


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_file_and_function_budgets(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= MAX_FILE_LINES, f"{path.name} has more than {MAX_FILE_LINES} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{node.name} has {length} lines"


def test_lua_files_keep_the_same_budget() -> None:
    for path in (ROOT / "headrace").rglob("*.lua"):
        assert path.read_text(encoding="utf-8").count("\n") <= MAX_FILE_LINES, path.name


def test_names_say_what_a_thing_is() -> None:
    vague = ("utils", "helper", "helpers", "manager", "misc", "common")
    assert [p for p in sources() if p.stem in vague or p.parent.name in vague] == []
