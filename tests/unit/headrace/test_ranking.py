"""Who is shown where more choices are computed than asked for."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.frame import FinishReason
from headrace.logprobs import UNTOLD, TokenLogprob
from headrace.ranking import Candidate, likeliest, measured_logprobs
from headrace.request import Request
from headrace.sampling import SamplingParams


def ended(*logprobs: float, reason: FinishReason = FinishReason.STOP) -> Candidate:
    return Candidate(reason, [TokenLogprob(value, 1) for value in logprobs])


def test_the_sum_decides_and_equal_sums_go_by_index() -> None:
    candidates = [ended(-1.0, -1.0), ended(-0.5), ended(-2.0), ended(-0.25, -0.25)]
    assert likeliest(candidates, 4) == (1, 3, 0, 2)
    assert likeliest(candidates, 1) == (1,)


def test_what_failed_or_cannot_be_compared_comes_last() -> None:
    failed = ended(-0.1, reason=FinishReason.FAILED)
    unknown = Candidate(FinishReason.LENGTH, [TokenLogprob(-0.1, 1), UNTOLD])
    assert likeliest([failed, unknown, ended(-9.0, reason=FinishReason.LENGTH)], 3) == (2, 1, 0)
    assert likeliest([failed, failed], 1) == (0,)


@given(st.lists(st.lists(st.floats(-50, 0), max_size=5), min_size=1, max_size=8), st.integers(1, 8))
def test_nobody_left_out_is_likelier_than_one_who_is_shown(values: list[list[float]], best: int) -> None:
    sums = [math.fsum(one) for one in values]
    shown = likeliest([ended(*one) for one in values], best)
    assert len(set(shown)) == len(shown) == min(best, len(values))
    assert [sums[i] for i in shown] == sorted(sums, reverse=True)[:best]


@pytest.mark.parametrize(
    ("asked", "best", "measured"), [(None, 0, None), (None, 2, 0), (0, 2, 0), (5, 2, 5), (5, 0, 5)]
)
def test_ranked_choices_are_measured_whether_asked_or_not(asked: int | None, best: int, measured: int | None) -> None:
    request = Request("a", "m", (1,), SamplingParams(max_tokens=4, logprobs=asked), n=4, best=best)
    assert measured_logprobs(request) == measured
