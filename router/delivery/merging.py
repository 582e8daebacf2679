"""Neighbouring deltas of a choice become one while they wait, as far as one message carries them."""

from __future__ import annotations

from dataclasses import replace

from headrace.events import Delta

MAX_SCORED_TOKENS = 4_096
"""Most tokens with log probabilities in one delta. With 20 likeliest ids each that is 1.3 MB, below the 4 MB that gRPC
clients accept unless told otherwise."""


def merged(before: Delta, after: Delta) -> Delta | None:
    """None where it would grow too large."""
    if len(before.logprobs) + len(after.logprobs) > MAX_SCORED_TOKENS:
        return None
    return replace(
        before,
        token_ids=before.token_ids + after.token_ids,
        text=before.text + after.text,
        logprobs=before.logprobs + after.logprobs,
    )
