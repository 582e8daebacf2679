"""What `headrace chat` and `generate` read, and how they tell a refusal."""

from __future__ import annotations

import io
from typing import NoReturn

import pytest

from cluster.cli.chat import _read_line, _show, _text_of
from cluster.errors import OperatorError
from headrace.errors import InvalidRequest


def _stdin(monkeypatch: pytest.MonkeyPatch, content: bytes, encoding: str = "ascii") -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), encoding))


def test_standard_input_is_utf8_in_any_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    _stdin(monkeypatch, "日本\n".encode())
    assert _text_of("-") == "日本"


def test_other_bytes_are_told_and_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    _stdin(monkeypatch, b"ab\xff")
    with pytest.raises(OperatorError, match="not UTF-8 text: byte 2"):
        _text_of("-")
    _stdin(monkeypatch, b"\xff\n", "utf-8")
    with pytest.raises(OperatorError, match="not UTF-8 text"):
        _read_line("")


@pytest.mark.parametrize(
    ("field", "told"),
    [("top_p", "--top-p: too bad"), ("stop[0]", "--stop: too bad"), ("prompt", "too bad"), (None, "too bad")],
)
def test_a_refusal_names_the_flag_where_there_is_one(field: str | None, told: str) -> None:
    def refuse() -> NoReturn:
        raise InvalidRequest("too bad", field=field)

    with pytest.raises(OperatorError) as caught:
        _show(refuse, as_json=False)
    assert str(caught.value) == told
