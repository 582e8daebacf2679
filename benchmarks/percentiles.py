"""Percentiles, defined once: linear interpolation between the two closest ranks.

For n sorted samples x[0] … x[n-1] the p-th percentile stands at rank p / 100 * (n - 1), counted from 0; between two
ranks it is interpolated. This is numpy's default ("linear", Hyndman and Fan's type 7), which vLLM's benchmark uses too,
so figures compare. With few samples it is not a bound: p99 of 20 samples lies between the two largest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of samples in rising order. ValueError when there are none or `percent` is outside 0 to 100."""
    if not ordered or not 0 <= percent <= 100:
        raise ValueError("a percentile needs samples and a percent from 0 to 100")
    rank = percent / 100 * (len(ordered) - 1)
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


@dataclass(frozen=True)
class Summary:
    """Of one quantity over all its samples, in the samples' unit."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


def summary(samples: Iterable[float]) -> Summary | None:
    """None when there are no samples: a figure nobody measured is not 0."""
    ordered = sorted(samples)
    if not ordered:
        return None
    p50, p90, p99 = (percentile(ordered, p) for p in (50, 90, 99))
    return Summary(len(ordered), sum(ordered) / len(ordered), p50, p90, p99, ordered[-1])
