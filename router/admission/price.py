"""What a request will probably cost in KV blocks: its prompt and the output it is expected to write."""

from __future__ import annotations

from headrace.request import Request

PRIOR_OUTPUT_TOKENS = 256.0
"""Guess before anything has finished; near the median output of public chat traces."""
WEIGHT_OF_NEWEST = 0.05
"""An exponential mean over about the last forty answers."""


class OutputEstimate:
    """The running mean of how long answers turn out to be. Not thread-safe: it lives on the event loop."""

    def __init__(self) -> None:
        self._mean_tokens = PRIOR_OUTPUT_TOKENS

    @property
    def mean_tokens(self) -> float:
        return self._mean_tokens

    def finished(self, output_tokens: int) -> None:
        """Learns from one answer that ended by itself (not by a cancel or a failure)."""
        self._mean_tokens += WEIGHT_OF_NEWEST * (output_tokens - self._mean_tokens)

    def expected_tokens(self, request: Request) -> int:
        """Of one choice. At least one token; all of `max_tokens` where nothing can end the answer sooner."""
        params = request.sampling
        most = params.max_tokens or 1
        if params.ignore_eos and not params.stop and not params.stop_token_ids:
            return most
        return max(1, params.min_tokens, min(most, round(self._mean_tokens)))


def price_blocks(prompt_tokens: int, expected_output_tokens: int, block_size: int, choices: int = 1) -> int:
    """Blocks for prompt and expected output of each choice; the last block of each may be part full.

    Choices share the full blocks of their prompt; from its last, part full one on each writes its own.
    """
    shared, rest = divmod(prompt_tokens, block_size)
    return shared + choices * -(-(rest + expected_output_tokens) // block_size)
