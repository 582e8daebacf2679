"""When open-loop calls arrive: whether or not the cluster keeps up, as real users do."""

from __future__ import annotations

from random import Random


def poisson_arrivals_s(rate_per_s: float, count: int, rng: Random) -> tuple[float, ...]:
    """`count` rising times in seconds from the start: independent exponential gaps of mean 1 / `rate_per_s`."""
    arrivals, now_s = [], 0.0
    for _ in range(count):
        now_s += rng.expovariate(rate_per_s)
        arrivals.append(now_s)
    return tuple(arrivals)
