"""README's and the docs' error table is the one in the code."""

from __future__ import annotations

import pickle
from pathlib import Path

import grpc
import pytest

from headrace import errors

DOC = Path(__file__).parents[2] / "docs" / "errors.md"


def kinds() -> list[type[errors.HeadraceError]]:
    return [getattr(errors, row.name) for row in errors.table()]


def test_every_row_of_the_tree_is_documented() -> None:
    text = DOC.read_text(encoding="utf-8")
    for row in errors.table():
        assert f"| `{row.name}` | {row.grpc} | {row.http} | `{row.openai_type}` |" in text, row.name


@pytest.mark.parametrize("kind", kinds(), ids=lambda k: k.__name__)
def test_codes_exist_and_errors_survive_pickling(kind: type[errors.HeadraceError]) -> None:
    assert hasattr(grpc.StatusCode, kind.status.grpc)
    assert 400 <= kind.status.http <= 599
    back = pickle.loads(pickle.dumps(kind("why", field="messages[0]", retry_after_s=1.5)))
    assert (type(back), back.message, back.field, back.retry_after_s) == (kind, "why", "messages[0]", 1.5)
