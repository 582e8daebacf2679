"""The pace that running requests shall keep, and what of a step it leaves to prefills.

A request's tokens have due times: one inter-token latency (ITL) after the other, from its first token on. A request
that is ahead of its times has slack, and a prefill may use it. After Sarathi-Serve's stall-free batches, with a bound
in seconds of this machine in place of a number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

from workers.scheduler.step_time import StepTime, pass_of

MOST_AHEAD = 2.0
"""A request may save up slack of so many ITLs: no gap that a prefill makes between two tokens is planned longer."""
LEAST_SHARE = 16
"""A step leaves at least the 16th part of the static cap to prefills, however late the decodes are, so that prompts
cannot starve; and at least so many tokens."""


def next_due_s(due_s: float | None, now: float, itl_s: float) -> float:
    """When the token after one sampled `now` is due, given when that one was (None: it was the first). Earliness is
    carried on, up to MOST_AHEAD; lateness is not: a request that was held up does not hurry afterwards.
    """
    scheduled = now if due_s is None else max(due_s, now)
    return min(scheduled + itl_s, now + MOST_AHEAD * itl_s)


def prefill_tokens(
    step_time: StepTime,
    decodes: Iterable[tuple[int, int]],
    due_s: float,
    now: float,
    *,
    start: int,
    cap: int,
    most: int,
) -> int:
    """Prefill tokens for a step beside `decodes` (start, count), the first of which is due at `due_s`: the largest
    chunk that keeps to that, up to `most` and not below the least share of the static `cap`. `start`: how many tokens
    are computed of the sequence that the chunk continues.
    """
    in_time = step_time.largest_chunk(due_s - now, pass_of(decodes), start, most)
    return min(most, max(in_time, LEAST_SHARE, cap // LEAST_SHARE))
