"""How likely a token was: what a worker measures beside each token and what clients may ask to see."""

from __future__ import annotations

import math
from dataclasses import dataclass

NO_LOGPROB = math.nan
"""Of the first prompt token, which nothing precedes, and of tokens whose worker told none."""


@dataclass(frozen=True)
class TokenLogprob:
    """Natural logarithms of the model's own distribution: before temperature, penalties, biases and masks (as OpenAI's
    and vLLM's defaults).
    """

    logprob: float
    rank: int
    """1 for the likeliest id; 0 where there is no logprob."""
    top: tuple[tuple[int, float], ...] = ()
    """(id, logprob) of the likeliest ids, the likeliest first, ties to the lower id; as many as asked for."""


UNTOLD = TokenLogprob(NO_LOGPROB, 0)
"""Stands for a token of which no log probability is known."""
