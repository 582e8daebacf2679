"""How long prompts and answers are: distributions by name, drawn with a seeded generator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from benchmarks.errors import BenchError

GRAMMAR = "N, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA:LOW:HIGH or mixed"
MIXED = "lognormal:128:1.0:4:2048"
"""`mixed`: heavy-tailed, as chat is; the mean is about 1.6 times the median."""


class Lengths(Protocol):
    """A distribution of token counts."""

    def draw(self, rng: Random) -> int:
        """One count, at least 1."""
        ...


@dataclass(frozen=True)
class Fixed:
    tokens: int

    def draw(self, rng: Random) -> int:
        return self.tokens


@dataclass(frozen=True)
class Uniform:
    """Every whole number from `low` to `high`, both included, equally likely."""

    low: int
    high: int

    def draw(self, rng: Random) -> int:
        return rng.randint(self.low, self.high)


@dataclass(frozen=True)
class LogNormal:
    """exp(N(ln median, sigma)), cut to [low, high]: half the draws lie below the median, a few far above it."""

    median: int
    sigma: float
    low: int
    high: int

    def draw(self, rng: Random) -> int:
        drawn = round(rng.lognormvariate(math.log(self.median), self.sigma))
        return min(max(drawn, self.low), self.high)


def parse_lengths(text: str) -> Lengths:
    """Reads `GRAMMAR`. Raises BenchError quoting `text` and what would do."""
    name, *numbers = (MIXED if text == "mixed" else text).split(":")
    try:
        if name.isascii() and name.isdigit() and not numbers:
            return Fixed(_at_least_one(name))
        if name == "uniform":
            low, high = map(_at_least_one, numbers)
            return Uniform(low, _not_below(high, low))
        if name == "lognormal":
            median, sigma, low_text, high_text = numbers
            low = _at_least_one(low_text)
            return LogNormal(_at_least_one(median), _positive(sigma), low, _not_below(_at_least_one(high_text), low))
    except ValueError:
        pass  # the wrong count of numbers, or one of them is not one: the line below says what would do
    raise BenchError(f"{text!r} is no distribution of lengths: give {GRAMMAR}")


def _at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise ValueError(text)
    return value


def _not_below(value: int, low: int) -> int:
    if value < low:
        raise ValueError(value)
    return value


def rescaled(lengths: Sequence[int], total: int) -> tuple[int, ...]:
    """The same shape with exactly `total` tokens: scaled, rounded down, and the rest given to the largest remainders.

    Each stays at least 1, so `total` must be at least `len(lengths)` (ValueError else).
    """
    if total < len(lengths):
        raise ValueError(f"{total} tokens cannot fill {len(lengths)} requests")
    spare = total - len(lengths)  # one token each is set aside first
    whole = sum(lengths)
    shares = [length * spare for length in lengths]
    scaled = [1 + share // whole for share in shares]
    by_remainder = sorted(range(len(lengths)), key=lambda i: (-(shares[i] % whole), i))
    for i in by_remainder[: total - sum(scaled)]:
        scaled[i] += 1
    return tuple(scaled)
