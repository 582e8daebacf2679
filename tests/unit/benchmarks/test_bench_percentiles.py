"""Percentiles by their written definition, and equal to numpy's default."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.percentiles import Summary, percentile, summary


@pytest.mark.parametrize(
    ("samples", "percent", "expected"),
    [
        ([7.0], 99, 7.0),
        ([1.0, 2.0], 50, 1.5),
        ([1.0, 2.0, 3.0], 50, 2.0),
        ([0.0, 10.0], 90, 9.0),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 0, 1.0),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 100, 5.0),
        ([float(i) for i in range(101)], 99, 99.0),
        ([0.0] * 18 + [1.0, 2.0], 99, pytest.approx(1.81)),
    ],
)
def test_interpolates_between_the_closest_ranks(samples: list[float], percent: float, expected: float) -> None:
    assert percentile(samples, percent) == expected


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60), st.sampled_from([0, 1, 50, 90, 99, 99.9, 100]))
def test_equals_numpy(samples: list[float], percent: float) -> None:
    assert percentile(sorted(samples), percent) == pytest.approx(float(np.percentile(samples, percent)), abs=1e-6)


@pytest.mark.parametrize(("samples", "percent"), [([], 50), ([1.0], -1), ([1.0], 101)])
def test_refuses_what_has_no_percentile(samples: list[float], percent: float) -> None:
    with pytest.raises(ValueError, match="percentile"):
        percentile(samples, percent)


def test_summary_sorts_first_and_is_none_without_samples() -> None:
    assert summary([3.0, 1.0, 2.0]) == Summary(
        count=3, mean=2.0, p50=2.0, p90=pytest.approx(2.8), p99=pytest.approx(2.98), max=3.0
    )
    assert summary([]) is None
