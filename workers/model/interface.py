"""The border between the engine (plain data) and the model runner (tensors)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.logprobs import TokenLogprob
from headrace.sampling import SamplingParams
from workers.kv.moves import Move


@dataclass(frozen=True)
class SequenceSlice:
    """The rows one sequence contributes to a forward pass: tokens at positions [start, start + len(token_ids))."""

    token_ids: tuple[int, ...]
    start: int
    """Tokens of this sequence whose KV is already in its blocks."""
    block_ids: tuple[int, ...]
    """Its whole block table, long enough for start + len(token_ids) slots."""
    sample: SampleSpec | None
    """None for a chunk that does not reach the end of the known tokens: nothing is sampled, but a fault is told."""
    score: ScoreSpec | None = None
    """Which of its rows' logits are to be told as the log probabilities of prompt tokens."""


@dataclass(frozen=True)
class ScoreSpec:
    """Row i of the slice (from row 0 on) predicts `targets[i]`; rows beyond the targets are not scored."""

    targets: tuple[int, ...]
    top: int
    """How many of the likeliest ids are told beside each target."""


class GrammarState(Protocol):
    """Where one choice stands in its grammar; whoever owns the choice advances it with each accepted token."""

    def fill_mask(self, out_row: memoryview) -> None:
        """Writes which ids may come next: `out_row` holds ceil(vocabulary / 32) int32 words (format "i", writable, all
        0 before the call), and bit i % 32 of word i // 32 allows id i. Bits beyond the vocabulary are not read.
        """
        ...


@dataclass(frozen=True)
class SampleSpec:
    """How to sample the next token of one sequence: a pure function of (logits, params, seed, choice, token index)."""

    params: SamplingParams
    seed: int
    choice: int
    token_index: int
    banned_token_ids: tuple[int, ...] = ()
    """Ids that may not come now: EOS and stop ids while below `min_tokens`. EOS under `ignore_eos` may come and ends
    nothing."""
    grammar: GrammarState | None = None
    """None: every id may come."""
    key: object = None
    """Whose sample this is, the same for all samples of one choice while its tokens only grow: what a sampler keeps
    between steps it keeps under this; None: nothing."""
    tokens: Sequence[int] = ()
    """Prompt and output so far, a view of the owner's list: read during the call only. Output begins at …"""
    prompt_tokens: int = 0


@dataclass(frozen=True)
class Sampled:
    """The result for one slice that asked for a sample. `fault` is a sentence when the logits were unusable (NaN), else
    ""."""

    token_id: int
    fault: str = ""
    logprob: TokenLogprob | None = None
    """Where the spec's params ask for logprobs."""


@dataclass(frozen=True)
class Computed:
    """What one slice gave."""

    sampled: Sampled | None = None
    """None where no sample was asked for and there is no fault."""
    scores: tuple[TokenLogprob, ...] = ()
    """One for each target of its `score`."""


@dataclass(frozen=True)
class ModelShape:
    """What scheduling and reporting need to know of a model."""

    name: str
    vocab_size: int
    max_context: int
    bytes_per_token_kv: int
    eos_token_ids: tuple[int, ...]
    weight_version: str
    """Hash of the weights' identity: continuing a stream needs an equal one."""
    numerics: str


class ModelRunner(Protocol):
    """Owns weights and the paged KV tensors `[num_blocks, block_size, num_kv_heads, head_dim]`; one thread calls it."""

    @property
    def shape(self) -> ModelShape: ...

    @property
    def num_blocks(self) -> int:
        """KV blocks it has allocated: ids 0 … num_blocks-1 are the scheduler's to hand out."""
        ...

    @property
    def scratch_block(self) -> int:
        """A block beyond `num_blocks` for rows that pad a batch: written, never read by anyone."""
        ...

    @property
    def host_blocks(self) -> int:
        """Blocks that its host memory holds besides: slots 0 … host_blocks-1; 0 without any."""
        ...

    @property
    def move_block_s(self) -> float:
        """Seconds that one block takes to host memory and back; 0.0 while that has not been measured."""
        ...

    def forward(self, slices: Sequence[SequenceSlice], moves: Sequence[Move] = ()) -> tuple[Computed, ...]:
        """Carries the moves out in their order, then writes KV for every row; returns one result per slice, in order.
        Raises only for faults of the device.
        """
        ...
