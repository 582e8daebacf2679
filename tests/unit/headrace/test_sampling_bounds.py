"""Every bound of the sampling parameters, from both sides, with the field's name."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.errors import InvalidRequest
from headrace.sampling import MAX_STOP_STRING_CHARS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS, SamplingParams

GOOD: list[dict[str, Any]] = [
    {},
    {"max_tokens": 1, "min_tokens": 1},
    {"temperature": 0, "top_p": 1, "top_k": 0},
    {"temperature": 100.0, "top_p": 1e-9, "seed": -(2**63)},
    {"stop": ("x" * MAX_STOP_STRING_CHARS,) * MAX_STOP_STRINGS},
    {"stop_token_ids": (2**31 - 1,) * MAX_STOP_TOKEN_IDS},
]
BAD: list[tuple[str, Any, str]] = [
    ("max_tokens", 0, "max_tokens"),
    ("max_tokens", -1, "max_tokens"),
    ("max_tokens", 1.0, "max_tokens"),
    ("max_tokens", True, "max_tokens"),
    ("max_tokens", "5", "max_tokens"),
    ("min_tokens", -1, "min_tokens"),
    ("min_tokens", None, "min_tokens"),
    ("temperature", -1e-9, "temperature"),
    ("temperature", 100.1, "temperature"),
    ("temperature", float("nan"), "temperature"),
    ("temperature", float("inf"), "temperature"),
    ("temperature", None, "temperature"),
    ("top_p", 0, "top_p"),
    ("top_p", 1.01, "top_p"),
    ("top_k", -1, "top_k"),
    ("seed", 2**63, "seed"),
    ("stop", ("",), "stop[0]"),
    ("stop", ("a", 5), "stop[1]"),
    ("stop", ("a", "\ud800"), "stop[1]"),
    ("stop", ("x" * (MAX_STOP_STRING_CHARS + 1),), "stop[0]"),
    ("stop", ("x",) * (MAX_STOP_STRINGS + 1), "stop"),
    ("stop_token_ids", (1, -1), "stop_token_ids[1]"),
    ("stop_token_ids", (1,) * (MAX_STOP_TOKEN_IDS + 1), "stop_token_ids"),
]


@pytest.mark.parametrize("values", GOOD, ids=str)
def test_the_edges_are_inside(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    assert params.validated() is params


@pytest.mark.parametrize(("name", "value", "field"), BAD, ids=lambda value: repr(value)[:30])
def test_beyond_the_edges_is_refused_by_name(name: str, value: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{name: value}).validated()
    assert caught.value.field == field
    assert len(caught.value.message) < 200


def test_minimum_above_maximum() -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(max_tokens=3, min_tokens=4).validated()
    assert caught.value.field == "min_tokens"
