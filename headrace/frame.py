"""What one iteration publishes: its tokens and the worker's load report (DESIGN sections 1 and 4)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from headrace.logprobs import TokenLogprob


class FinishReason(StrEnum):
    """Why a choice ended. `stop`, `length` are the client's; the rest are told as errors or cancellations."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    FAILED = "failed"


@dataclass(frozen=True)
class Part:
    """The new tokens of one choice of one request in one frame.

    `first_index` is the token index of `token_ids[0]` (or the journal's length when there are none). `finish` is None
    while the choice runs on. `detail` is a sentence for the client where finish is `failed`.
    """

    request_id: str
    choice: int
    epoch: int
    first_index: int
    token_ids: tuple[int, ...]
    finish: FinishReason | None = None
    detail: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of `token_ids` where the request asks for them, else none."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """Of all prompt tokens, where asked for, with the first output token of choice 0; the very first has none (NaN)."""


@dataclass(frozen=True)
class LoadReport:
    """A worker's truth after one iteration. Blocks are of `block_size` token slots; free + cached + held = total.

    `credit_blocks` is how many blocks of new work its own admission test would accept now; `free_slots` how many more
    requests it can hold at once (0 means no credit whatever the blocks).
    """

    seq: int
    credit_blocks: int
    free_slots: int
    free_blocks: int
    cached_blocks: int
    held_blocks: int
    total_blocks: int
    block_size: int
    max_context: int
    running: int
    waiting: int
    uncomputed_tokens: int
    """Prompt (and replayed) tokens whose KV is not yet written: the prefill backlog."""
    step_s: float
    """Duration of the last iteration, 0.0 before the first."""
    drain_tokens_per_s: float
    """Measured output tokens per second, smoothed; 0.0 until known."""
    iterations: int
    prompt_tokens_total: int
    output_tokens_total: int
    preemptions_total: int
    draining: bool
    model: str
    weight_version: str
    numerics: str
    """Fingerprint of kernels, ISA, threads and dtype: equal ones continue a stream bit for bit."""
    waiting_by_reason: tuple[tuple[str, int], ...] = ()
    slot_steps_total: int = 0
    """Sequence slots times iterations: the slots that a batch keeps, or one for each running sequence. Of these …"""
    slot_steps_wasted_total: int = 0
    """… so many in which the iteration computed nothing of anybody's."""
    rows_total: int = 0
    """Tokens computed for sequences: prefill, decode, and both again after a preemption."""
    padding_rows_total: int = 0
    """Tokens computed beside them only to make batches rectangular."""
    waited_s_by_reason: tuple[tuple[str, float], ...] = ()
    """Seconds that requests have waited here, by reason: they sum to all queue time charged so far."""
    prefix_tokens_total: int = 0
    """Known tokens of all that were started, as often as they were …"""
    prefix_hit_tokens_total: int = 0
    """… so many of them were found computed, in the cache, in host memory or with another choice …"""
    host_hit_tokens_total: int = 0
    """… and so many of these came back from host memory."""


@dataclass(frozen=True)
class Frame:
    """The engine's output for one iteration. `last_inbox_id` is the newest inbox entry already counted in `load`."""

    load: LoadReport
    parts: tuple[Part, ...]
    last_inbox_id: str
