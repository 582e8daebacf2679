"""Row-invariant mode on the CPU: what a row gets depends on the row alone (DESIGN section 6, ADR 7).

CPU matrix products take other code paths for few rows, and element-wise kernels treat the last few elements of a range
apart. Both go away when every pass, and every product in it, has a multiple of ROW_TILE rows: a pass is filled up with
rows that stand on the scratch block, the rows whose logits are kept are filled up with repetitions, and the rows that
go to one expert are filled up with zeros. Whether that is enough on this machine is not believed but tried at start, by
`differing_layout`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from headrace.sampling import SamplingParams
from workers.model.interface import SampleSpec, SequenceSlice

ROW_TILE = 16
EXPERTS_NAME = "headrace_invariant"
PROBE_TOKENS = 41
"""More than two tiles, and no multiple of one."""

Logits = Callable[[Sequence[SequenceSlice]], Tensor]
"""Runs slices, returns logits `[slices that sample, vocabulary]`."""


def filled_up(slices: Sequence[SequenceSlice], scratch_block: int, block_size: int) -> Sequence[SequenceSlice]:
    """The slices, and behind them one that brings the rows to a multiple of ROW_TILE."""
    missing = -sum(len(piece.token_ids) for piece in slices) % ROW_TILE
    if not missing:
        return slices
    blocks = (scratch_block,) * -(-missing // block_size)
    return (*slices, SequenceSlice((0,) * missing, 0, blocks, None))


def filled_up_rows(rows: Tensor) -> Tensor:
    """Row numbers `[n]`, the last repeated to a multiple of ROW_TILE."""
    missing = -len(rows) % ROW_TILE
    return torch.cat((rows, rows[-1:].expand(missing))) if missing and len(rows) else rows


def register_experts() -> None:
    """Makes `experts_implementation=EXPERTS_NAME` known to transformers; safe to repeat."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, experts_forward)


def experts_forward(module: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """transformers' experts, `[rows, hidden]` with `[rows, top_k]` choices and weights: one product per expert over a
    multiple of ROW_TILE rows, and each row's sum taken in the order of its choices.
    """
    parts = hidden.new_empty(*top_k_index.shape, hidden.shape[1])
    for expert in top_k_index.unique().tolist():
        rows, places = torch.where(top_k_index == expert)
        tile = pad(hidden.index_select(0, rows), (0, 0, 0, -len(rows) % ROW_TILE))
        parts[rows, places] = _one_expert(module, expert, tile)[: len(rows)]
    weighted = parts * top_k_weights[..., None]
    total = weighted[:, 0]
    for place in range(1, top_k_index.shape[1]):
        total = total + weighted[:, place]
    return total.to(hidden.dtype)


def _one_expert(module: nn.Module, expert: int, rows: Tensor) -> Tensor:
    if module.has_gate:
        inner = module._apply_gate(_linear(module, "gate_up_proj", expert, rows))  # type: ignore[operator]
    else:
        inner = module.act_fn(_linear(module, "up_proj", expert, rows))  # type: ignore[operator]
    out = _linear(module, "down_proj", expert, inner)
    if module.has_post_expert_norm:
        out = module.post_expert_norm(out)  # type: ignore[operator]
    return out


def _linear(module: nn.Module, name: str, expert: int, rows: Tensor) -> Tensor:
    weight: Tensor = getattr(module, name)[expert]
    bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    return nn.functional.linear(rows, weight.T if module.is_transposed else weight, bias)


def differing_layout(logits: Logits, vocab_size: int, most_tokens: int, block_size: int) -> str:
    """Runs one short prompt whole, in chunks, its end token by token, and beside others; "" when its last logits have
    the same bits every time, else which way differed. Uses the blocks from 0 on.
    """
    count = min(PROBE_TOKENS, most_tokens)
    tokens = tuple((7919 * i + 11) % vocab_size for i in range(count))
    blocks = tuple(range(-(-count // block_size)))
    greedy = SampleSpec(SamplingParams(max_tokens=1, temperature=0.0), seed=0, choice=0, token_index=0)

    def run(cuts: Sequence[int], beside: int = 0) -> Tensor:
        last = torch.empty(0)
        for start, end in zip((0, *cuts), (*cuts, count), strict=True):
            piece = SequenceSlice(tokens[start:end], start, blocks, greedy)
            last = logits((piece,) * (1 + beside))[0]
        return last

    whole = run(())
    ways = {
        "in chunks of 16": tuple(range(16, count, 16)),
        "in chunks of 7": tuple(range(7, count, 7)),
        "token by token": tuple(range(max(1, count - 4), count)),
    }
    for way, cuts in ways.items():
        if not torch.equal(run(cuts), whole):
            return way
    return "" if torch.equal(run((count // 2,), beside=20), whole) else "beside 20 others"
