"""How long will this output be? Learned online from the lengths of what finished here."""

from __future__ import annotations

import math
from typing import Any

from workers.scheduler.sequence import Sequence

QUANTILE = 0.9
"""Estimates aim above nine of ten requests; the tenth is what preemption is for."""
HALF_LIFE_FINISHES = 64
DEFAULT_TOKENS = 256
"""Assumed total before anything has finished."""
BUCKETS_PER_OCTAVE = 4
ALARM_STEP = 0.25
CALM_FACTOR = 0.95


class OutputEstimate:
    """An exponentially weighted histogram of finished lengths, asked for the QUANTILE *given what was already
    produced*.

    Buckets are geometric (four per doubling), so an estimate is at most 19 % long. Preemption means the estimates
    were too low: each one moves them a quarter of the way to the maximum, each finished request 5 % of the way back
    (the idea of a decaying over-commit is SGLang's new-token ratio).
    """

    def __init__(self) -> None:
        self._weights: dict[int, float] = {}
        self._next_weight = 1.0
        self._alarm = 0.0
        self._answers: dict[int, int | None] = {}

    def memory(self) -> dict[str, Any]:
        """All that its answers depend on, as plain JSON."""
        return {"weights": list(self._weights.items()), "next_weight": self._next_weight, "alarm": self._alarm}

    def recall(self, memory: dict[str, Any]) -> None:
        """Answers from here on as the one did whose memory this is."""
        self._weights = dict(memory["weights"])
        self._next_weight, self._alarm = memory["next_weight"], memory["alarm"]
        self._answers.clear()

    def finished(self, output_tokens: int) -> None:
        """One request ended by itself after so many tokens."""
        bucket = _bucket(output_tokens)
        self._weights[bucket] = self._weights.get(bucket, 0.0) + self._next_weight
        self._next_weight *= 2 ** (1 / HALF_LIFE_FINISHES)
        if self._next_weight > 1e12:
            self._weights = {key: weight / self._next_weight for key, weight in self._weights.items()}
            self._next_weight = 1.0
        self._alarm *= CALM_FACTOR
        self._answers.clear()

    def preempted(self) -> None:
        """Blocks ran out: trust the history less for a while."""
        self._alarm += (1.0 - self._alarm) * ALARM_STEP

    def remaining(self, sequence: Sequence) -> int:
        """Output tokens still to come, from 1 (every running sequence samples at least once more) to what
        `max_tokens` leaves.
        """
        most = sequence.most_to_come
        if sequence.runs_to_the_end:
            return most
        total = self._total_given(sequence.output_tokens)
        likely = min(most, max(1, total - sequence.output_tokens))
        return likely + math.ceil(self._alarm * (most - likely)) if self._alarm > 0.01 else likely

    def _total_given(self, produced: int) -> int:
        """The QUANTILE of lengths above `produced`; half as long again where nothing that long has been seen."""
        if not self._weights:
            return max(DEFAULT_TOKENS, produced + produced // 2)
        start = _bucket(produced + 1)
        if start not in self._answers:
            self._answers[start] = self._quantile_from(start)
        answer = self._answers[start]
        return answer if answer is not None else produced + produced // 2 + 1

    def _quantile_from(self, start: int) -> int | None:
        tail = sorted((bucket, weight) for bucket, weight in self._weights.items() if bucket >= start)
        target = QUANTILE * sum(weight for _, weight in tail)
        for bucket, weight in tail:
            target -= weight
            if target <= 0:
                return _longest_in(bucket)
        return _longest_in(tail[-1][0]) if tail else None


def _bucket(tokens: int) -> int:
    return math.ceil(BUCKETS_PER_OCTAVE * math.log2(max(1, tokens)) - 1e-9)


def _longest_in(bucket: int) -> int:
    return int(2 ** (bucket / BUCKETS_PER_OCTAVE) + 1e-6)
