"""The counter-based noise: golden values (a stream moved to a newer release must go on as it was) and uniformity."""

from __future__ import annotations

import statistics

from workers.sampling.noise import uniform


def test_values_never_change_between_releases() -> None:
    drawn = [uniform(0, 0, 0), uniform(1, 0, 0), uniform(0, 1, 0), uniform(0, 0, 1), uniform(-(2**63), 3, 8191)]
    assert drawn == [0.854884744952093, 0.1094325019782797, 0.7618545553784364, 0.5235449890056109, 0.4524333595965909]


def test_each_of_seed_choice_and_index_matters_and_nothing_else() -> None:
    points = [(s, c, i) for s in range(-3, 4) for c in range(3) for i in range(20)]
    drawn = [uniform(*point) for point in points]
    assert len(set(drawn)) == len(points)
    assert drawn == [uniform(*point) for point in points]


def test_draws_fill_the_unit_interval_evenly() -> None:
    drawn = [uniform(7, 0, i) for i in range(20_000)]
    assert 0.0 <= min(drawn) < 0.001
    assert 0.999 < max(drawn) < 1.0
    assert abs(statistics.fmean(drawn) - 0.5) < 0.01
    assert abs(statistics.pvariance(drawn) - 1 / 12) < 0.003
    # Neighbouring token indices must be independent, or text would repeat itself.
    assert abs(statistics.correlation(drawn[:-1], drawn[1:])) < 0.03
