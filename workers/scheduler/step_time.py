"""How long will the next forward pass take? A linear model of this machine, learned from every pass it makes.

Nothing is shipped: coefficients start from the passes of the warm-up and follow what is measured, so a busier host, a
longer context or another kernel shows in the next predictions. Least squares with forgetting in its recursive form
(Plackett 1950), kept in terms of information rather than covariance, so that it cannot wind up; a coefficient that
would be negative is held at zero, because no token makes a pass shorter.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

FORGETTING = 0.96
"""Weight of a measurement after one more of its kind: some twenty-five count."""
PRIOR_INFORMATION = 1e-6
"""How firmly the model holds to zero before anything is measured: hardly."""
CAUTION_QUANTILE = 0.9
CAUTION_STEP = 0.02
"""Most that one pass moves the margin by which cautious predictions exceed the mean."""
WARM_UP_DECODES = 16
SPLIT_TOKENS = 1
"""A piece of so many tokens or fewer reads its context once, as a decode does."""


class Features(NamedTuple):
    """What of a pass decides its duration. Adding two gives the features of the pass that does both."""

    passes: float = 0.0
    """1 for a pass: launches, sampling, the loop itself."""
    prefill_tokens: float = 0.0
    decode_rows: float = 0.0
    context_tokens: float = 0.0
    """KV slots that the decode rows read."""
    attended_pairs: float = 0.0
    """(row, KV slot) pairs of the prefill chunks: what attention does beyond reading."""

    def plus(self, other: Features) -> Features:
        return Features(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


_SCALES = Features(1.0, 256.0, 32.0, 8_192.0, 131_072.0)
"""A typical size of each feature: the arithmetic is done in these units, where coefficients are of one magnitude."""
_SIZE = len(_SCALES)

EMPTY_PASS = Features(passes=1.0)


def piece(start: int, count: int) -> Features:
    """One sequence's share of a pass: its tokens [start, start + count)."""
    if count <= SPLIT_TOKENS:
        return Features(0.0, 0.0, float(count), float(count * (start + 1)), 0.0)
    return Features(0.0, float(count), 0.0, 0.0, count * start + count * (count + 1) / 2)


def pass_of(pieces: Iterable[tuple[int, int]]) -> Features:
    """A whole pass of pieces (start, count)."""
    tokens = rows = context = 0
    pairs = 0.0
    for start, count in pieces:
        if count <= SPLIT_TOKENS:
            rows += count
            context += count * (start + 1)
        else:
            tokens += count
            pairs += count * start + count * (count + 1) / 2
    return Features(1.0, float(tokens), float(rows), float(context), pairs)


def warm_up_passes(rows: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Passes of pieces (start, count) of one sequence of `rows` tokens that tell the features' shares apart: whole,
    the second half alone, then decodes with little and with much context, alone and many at once.
    """
    last, half = rows - 1, rows // 2
    chunks = (((0, rows),), ((0, rows),), ((half, rows - half),))
    return (*chunks, ((0, 1),), ((last, 1),), ((0, 1),) * WARM_UP_DECODES, ((last, 1),) * WARM_UP_DECODES)


class StepTime:
    """Predictions are pure; `measured` alone changes the model."""

    def __init__(self) -> None:
        self._seconds = [0.0] * _SIZE
        """Seconds per `_SCALES` of each feature, never negative."""
        self._information = [[PRIOR_INFORMATION * (i == j) for j in range(_SIZE)] for i in range(_SIZE)]
        self._margin = 1.0
        self._passes = 0

    @property
    def is_fitted(self) -> bool:
        """False until a pass has been measured: then every prediction is 0.0."""
        return self._passes > 0

    @property
    def coefficients(self) -> Features:
        """Seconds per unit of each feature."""
        return Features(*(seconds / scale for seconds, scale in zip(self._seconds, _SCALES, strict=True)))

    @property
    def margin(self) -> float:
        """Nine of ten passes take no longer than this many times their prediction; at least 1.0."""
        return self._margin

    @classmethod
    def of(cls, coefficients: Features, margin: float = 1.0) -> StepTime:
        """A model that predicts with these seconds per unit, as if it had measured them."""
        model = cls()
        model._seconds = [seconds * scale for seconds, scale in zip(coefficients, _SCALES, strict=True)]
        model._margin, model._passes = margin, 1
        return model

    def predict_s(self, features: Features) -> float:
        """Mean duration in seconds."""
        return sum(c * x / s for c, x, s in zip(self._seconds, features, _SCALES, strict=True))

    def recompute_s(self, tokens: int, behind: int = 0) -> float:
        """What it costs to prefill `tokens` again behind so many that are kept, on top of a pass that is made
        anyway."""
        return self.predict_s(_chunk(behind, tokens))

    def largest_chunk(self, slack_s: float, others: Features, start: int, most: int) -> int:
        """Most prefill tokens, up to `most`, that may join a pass of `others` so that with the margin it takes no
        longer than `slack_s`; they continue a sequence with `start` tokens computed. 0 when not even one fits;
        `most` while nothing is known.
        """
        if not self.is_fitted:
            return most
        within_s = slack_s / self._margin - self.predict_s(others)
        if within_s < 0:
            return 0
        # from two tokens on a chunk costs the more the longer it is
        return bisect_right(range(1, most + 1), within_s, key=lambda count: self.predict_s(_chunk(start, count)))

    def measured(self, features: Features, seconds: float) -> None:
        """One pass took so long. Errors count relative to the larger of the prediction and the measurement: short and
        long passes alike, and one that the host held up says little.
        """
        if seconds <= 0.0:
            return
        predicted_s = self.predict_s(features)
        self._follow_margin(seconds, predicted_s)
        self._passes += 1
        scale_s = max(seconds, predicted_s)
        row = [x / s / scale_s for x, s in zip(features, _SCALES, strict=True)]
        fade = [FORGETTING**0.5 if x else 1.0 for x in row]  # what this pass says nothing of is not forgotten
        information = self._information
        for i in range(_SIZE):
            for j in range(_SIZE):
                information[i][j] = information[i][j] * fade[i] * fade[j] + row[i] * row[j]
        error = (seconds - predicted_s) / scale_s
        self._move([x * error for x in row])

    def _follow_margin(self, seconds: float, predicted_s: float) -> None:
        """Stochastic approximation of a quantile (Robbins & Monro): up by nine small steps for each one down."""
        if predicted_s <= 0.0:
            return
        beyond = seconds > self._margin * predicted_s
        step = CAUTION_STEP * (CAUTION_QUANTILE if beyond else CAUTION_QUANTILE - 1.0)
        self._margin = max(1.0, self._margin + step)

    def _move(self, gradient: list[float]) -> None:
        """Solves information · change = gradient with no coefficient below zero: whatever would fall below is fixed
        there, and the rest solved again.
        """
        change = [0.0] * _SIZE
        free = list(range(_SIZE))
        while free:
            fixed = [i for i in range(_SIZE) if i not in free]
            target = [gradient[i] - sum(self._information[i][j] * change[j] for j in fixed) for i in free]
            solution = _solve([[self._information[i][j] for j in free] for i in free], target)
            worst = min(range(len(free)), key=lambda k: self._seconds[free[k]] + solution[k])
            if self._seconds[free[worst]] + solution[worst] >= 0.0:
                for i, moved in zip(free, solution, strict=True):
                    change[i] = moved
                break
            change[free[worst]] = -self._seconds[free[worst]]
            del free[worst]
        self._seconds = [max(0.0, seconds + moved) for seconds, moved in zip(self._seconds, change, strict=True)]


def _chunk(start: int, count: int) -> Features:
    return Features(0.0, float(count), 0.0, 0.0, count * start + count * (count + 1) / 2)


def _solve(matrix: list[list[float]], target: list[float]) -> list[float]:
    """x with matrix · x = target, for a symmetric positive definite matrix (Cholesky, in place)."""
    size = len(target)
    lower = [[0.0] * size for _ in range(size)]
    for i in range(size):
        for j in range(i + 1):
            rest = matrix[i][j] - sum(lower[i][k] * lower[j][k] for k in range(j))
            lower[i][j] = max(rest, 1e-18) ** 0.5 if i == j else rest / lower[j][j]
    half = [0.0] * size
    for i in range(size):
        half[i] = (target[i] - sum(lower[i][k] * half[k] for k in range(i))) / lower[i][i]
    answer = [0.0] * size
    for i in reversed(range(size)):
        answer[i] = (half[i] - sum(lower[k][i] * answer[k] for k in range(i + 1, size))) / lower[i][i]
    return answer
