"""Which choices are shown where more are computed than asked for ("best of"), as a pure function of their tokens.

The order is by cumulative log probability of the output tokens, as vLLM's: of the model's own distribution, whatever
temperature or penalties the tokens were sampled with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.frame import FinishReason
from headrace.logprobs import TokenLogprob
from headrace.request import Request

_OWN_ENDS = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(frozen=True)
class Candidate:
    """One choice that has ended."""

    reason: FinishReason
    logprobs: Sequence[TokenLogprob]
    """Of all its output tokens."""

    @property
    def cumulative(self) -> float:
        """Minus infinity where any is unknown: what cannot be compared wins nothing."""
        total = math.fsum(one.logprob for one in self.logprobs)
        return -math.inf if math.isnan(total) else total


def likeliest(candidates: Sequence[Candidate], best: int) -> tuple[int, ...]:
    """Indices of the `best` likeliest, the likeliest first, ties to the lower index. One that was ended by something
    other than its own tokens or limit comes after all that were not.
    """
    order = sorted(
        range(len(candidates)),
        key=lambda i: (candidates[i].reason not in _OWN_ENDS, -candidates[i].cumulative, i),
    )
    return tuple(order[:best])


def measured_logprobs(request: Request) -> int | None:
    """Of how many of the likeliest ids workers tell the log probability, beside each output token's own; None: of none
    and not the token's either. Choices that are to be ranked need their own tokens', asked for or not.
    """
    asked = request.sampling.logprobs
    return 0 if asked is None and request.best else asked
