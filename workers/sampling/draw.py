"""Drawing ids: temperature, top-k, top-p and min-p, for all rows that draw.

Top-k keeps every id whose logit is at least the k-th highest. Top-p, over what top-k left, keeps every id unless those
strictly likelier already hold p of the probability. Min-p keeps every id at least `min_p` times as likely as the
likeliest. So equal logits stay in or go out together, and no result depends on a sort's order.

The edge of top-p is never searched for. An id is drawn from all; if it lies outside, it and whatever is no likelier
leaves, and the row draws again with its next number. What is accepted follows exactly the distribution within the edge,
as in the sampling kernels of FlashInfer, and instead of a sort a row costs one pass over its weights for each draw:
1 / p of them on average at most.

Comparisons are written as 0.0 and 1.0 and multiplied: on the CPU several times as fast as choosing by booleans.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.model.interface import SampleSpec
from workers.sampling.blocks import threshold
from workers.sampling.noise import uniform
from workers.sampling.parameters import DrawnRows
from workers.sampling.scratch import Scratch
from workers.sampling.weights import block_sums, pick, weigh


def draw(logits: Tensor, peak: Tensor, drawn: DrawnRows, specs: Sequence[SampleSpec], scratch: Scratch) -> Tensor:
    """int64 ids `[drawn]` from `logits` `[rows, vocabulary]` with peaks `[rows]`. Rows whose peak is not finite give
    any id.
    """
    logits, peak = logits[drawn.index].float(), peak[drawn.index].float()[:, None]
    specs = [specs[row] for row in drawn.rows]
    # Taking the peak off before dividing keeps the smallest temperatures finite: the peak itself becomes exactly 0.
    weights = weigh(torch.sub(logits, peak, out=scratch.like(logits, "weights")).div_(drawn.temperature))
    if drawn.narrow_k or drawn.wide_k:
        weights.mul_(torch.ge(logits, _floors(logits, drawn), out=scratch.like(logits, "kept")))
    sums = block_sums(weights, scratch)
    mass = drawn.top_p * sums.sum(-1, keepdim=True)
    if drawn.has_min_p:
        weights.mul_(torch.ge(weights, drawn.min_p, out=scratch.like(weights, "kept")))
        sums = block_sums(weights, scratch)
    tokens = pick(weights, sums, _noise(specs, 0, logits.device))
    if drawn.with_p:
        _redraw_outside(tokens, weights, mass, drawn.with_p, specs, scratch)
    return tokens


def _floors(logits: Tensor, drawn: DrawnRows) -> Tensor:
    """Each row's k-th highest logit, `[rows, 1]`; -inf where there is no limit."""
    floors = torch.full_like(logits[:, :1], -torch.inf)
    for rows in (drawn.narrow_k, drawn.wide_k):
        if rows:
            index = torch.tensor(rows, device=logits.device)
            floors[index] = threshold(logits[index], drawn.top_k[index])
    return floors


def _redraw_outside(
    tokens: Tensor, weights: Tensor, mass: Tensor, rows: Sequence[int], specs: Sequence[SampleSpec], scratch: Scratch
) -> None:
    """Replaces in `tokens` what of `rows` lies outside the likeliest `mass` `[rows, 1]`. A row draws from fewer ids
    every time, and its likeliest are never outside, so it comes to an end.
    """
    index = torch.tensor(rows, device=tokens.device)
    if len(rows) < len(weights):
        weights, mass = weights.index_select(0, index), mass.index_select(0, index)
    specs = [specs[row] for row in rows]
    draws = 0
    while True:
        drawn = weights.gather(1, tokens[index, None])
        likelier = torch.gt(weights, drawn, out=scratch.like(weights, "kept")).mul_(weights)
        sums = block_sums(likelier, scratch)
        again = (sums.sum(-1, keepdim=True) >= mass)[:, 0].nonzero()[:, 0]
        if len(again) == 0:
            return
        draws += 1
        specs = [specs[i] for i in again.tolist()]
        index, weights, sums, mass = index[again], likelier[again], sums[again], mass[again]
        tokens[index] = pick(weights, sums, _noise(specs, draws, tokens.device))


def _noise(specs: Sequence[SampleSpec], draws: int, device: torch.device) -> Tensor:
    """float64 `[rows, 1]`."""
    numbers = [uniform(spec.seed, spec.choice, spec.token_index, draws) for spec in specs]
    return torch.tensor(numbers, dtype=torch.float64, device=device)[:, None]
