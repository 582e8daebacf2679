"""From logits to tokens, for all rows of a pass at once.

Order of application per row: grammar's mask → banned ids → temperature → top-k → top-p → draw. Temperature 0 is the
highest logit, ties to the lowest id. Top-k keeps every id whose logit is at least the k-th highest (so ties at the edge stay together, and
the result cannot depend on a sort's order). Top-p, over what top-k left, keeps every id whose logit is at least the
one at which the probabilities, highest first, first sum to p. The draw inverts the cumulative distribution *in order
of ids* at a number from `workers.sampling.noise`: summing in id order means that two nearly equal logits that swap
places between kernels do not move the other tokens.

Every quantity of a row is computed from that row alone, with sums taken as sequential scans in float64, so that a
row's token does not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.model.interface import Sampled, SampleSpec
from workers.sampling.masks import apply_masks, mask_rows, packed_masks
from workers.sampling.noise import uniform

NUCLEUS_GUESS = 512
"""Top-p looks at this many highest logits first, and sorts the whole row only where they sum to less than p."""
COLDEST = 1e-30
"""Temperatures below this draw the highest logit just as surely, and would be 0 in float32."""
UNUSABLE = "the model's logits are not numbers (NaN or infinite), so no token can be chosen"
FORBIDDEN = "grammar and banned ids together forbid every token, so none can be chosen"


def sample(logits: Tensor, specs: Sequence[SampleSpec]) -> tuple[Sampled, ...]:
    """One token per row of `logits` `[rows, vocabulary]`. A row whose logits are NaN, +inf or all -inf, or that may
    choose no id, yields a fault and harms no other row."""
    if not specs:
        return ()
    # Before masks, which could hide a NaN: what the model said must be numbers even where it may not be chosen.
    usable = torch.isfinite(logits.amax(dim=-1))
    logits = _without_banned(_within_grammars(logits, specs), specs)
    peak, tokens = logits.max(dim=-1)
    usable = usable.to(torch.int64) + (usable & torch.isfinite(peak))
    drawn = [row for row, spec in enumerate(specs) if spec.params.temperature > 0]
    if drawn:
        chosen = _draw(logits, [specs[row] for row in drawn], drawn)
        tokens[torch.tensor(drawn, device=logits.device)] = chosen
    ids, verdicts = torch.stack((tokens, usable)).tolist()
    return tuple(
        Sampled(token) if verdict == 2 else Sampled(0, _FAULTS[verdict])
        for token, verdict in zip(ids, verdicts, strict=True)
    )


_FAULTS = (UNUSABLE, FORBIDDEN)


def _within_grammars(logits: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
    """Logits with ids outside a row's grammar at -inf; the caller's tensor is not changed."""
    rows = mask_rows(specs)
    if not rows:
        return logits
    packed = packed_masks(specs, rows, logits.shape[1], logits.device)
    if len(rows) == logits.shape[0]:
        return apply_masks(logits, packed)
    index = torch.tensor(rows, device=logits.device)
    return logits.index_copy(0, index, apply_masks(logits.index_select(0, index), packed))


def _without_banned(logits: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
    """Logits with banned ids at -inf; the caller's tensor is not changed."""
    vocabulary = logits.shape[1]
    pairs = [(row, i) for row, spec in enumerate(specs) for i in spec.banned_token_ids if 0 <= i < vocabulary]
    if not pairs:
        return logits
    index = torch.tensor(pairs, device=logits.device).T
    floor = torch.full((), -torch.inf, dtype=logits.dtype, device=logits.device)
    return logits.index_put((index[0], index[1]), floor)


@dataclass(frozen=True)
class _Knobs:
    """The parameters of the rows to draw for, one tensor each, `[rows, 1]`."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    noise: Tensor

    @staticmethod
    def build(specs: Sequence[SampleSpec], vocabulary: int, device: torch.device) -> _Knobs:
        rows = [
            (
                s.params.temperature,
                s.params.top_k or vocabulary,
                s.params.top_p,
                uniform(s.seed, s.choice, s.token_index),
            )
            for s in specs
        ]
        columns = torch.tensor(rows, dtype=torch.float64, device=device).T[..., None]
        top_k = columns[1].clamp(max=vocabulary).long()
        return _Knobs(columns[0].float().clamp(min=COLDEST), top_k, columns[2], columns[3])


def _draw(logits: Tensor, specs: Sequence[SampleSpec], rows: Sequence[int]) -> Tensor:
    if len(rows) < logits.shape[0]:
        logits = logits.index_select(0, torch.tensor(rows, device=logits.device))
    knobs = _Knobs.build(specs, logits.shape[1], logits.device)
    # Taking the peak off before dividing keeps the smallest temperatures finite: the peak itself becomes exactly 0.
    weights = logits.float().sub(logits.amax(-1, keepdim=True)).div_(knobs.temperature).exp_()
    # Unusable rows come out as NaN here; with no weight at all they draw the last id, which nobody will read.
    weights.nan_to_num_(nan=0.0)
    vocabulary = logits.shape[1]
    limited = [i for i, s in enumerate(specs) if 0 < s.params.top_k < vocabulary or s.params.top_p < 1.0]
    if limited:
        weights = _limit(weights, knobs, limited)
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # Rounding may lift noise × total to the total itself, past the last id with any weight.
    target = torch.minimum(knobs.noise * total, torch.nextafter(total, torch.zeros_like(total)))
    found = torch.searchsorted(cumulative, target, right=True)
    return found[:, 0].clamp_(max=logits.shape[1] - 1)


def _limit(weights: Tensor, knobs: _Knobs, rows: Sequence[int]) -> Tensor:
    """Weights with everything outside top-k and top-p at zero, for `rows`; the others pass unchanged."""
    if len(rows) == weights.shape[0]:
        return _limit_all(weights, knobs.top_k, knobs.top_p)
    index = torch.tensor(rows, device=weights.device)
    limited = _limit_all(weights.index_select(0, index), knobs.top_k[index], knobs.top_p[index])
    return weights.index_copy(0, index, limited)


def _limit_all(weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    vocabulary = weights.shape[1]
    floor, settled = _edge(weights, top_k, top_p, min(NUCLEUS_GUESS, vocabulary))
    if not settled.all():
        left = (~settled[:, 0]).nonzero()[:, 0]
        floor[left] = _edge(weights[left], top_k[left], top_p[left], vocabulary)[0]
    return torch.where(weights >= floor, weights, 0.0)


def _edge(weights: Tensor, top_k: Tensor, top_p: Tensor, look: int) -> tuple[Tensor, Tensor]:
    """The smallest weight that stays, `[rows, 1]`, judged by the `look` highest, and whether those were enough to tell.

    A row's answer does not depend on `look` where it is settled: the scan over the highest weights has the same prefix.
    """
    highest = weights.topk(look, dim=-1).values
    last = top_k.clamp(max=look) - 1
    k_floor = highest.gather(1, last)
    all_k = top_k <= look
    # Ties at the k-th place stay in, so what top-p works on is everything down to the k-th weight.
    kept = torch.where(highest >= k_floor, highest, 0.0)
    among = torch.where(all_k, k_floor, 0.0)
    total = torch.where(weights >= among, weights, 0.0).cumsum(-1, dtype=torch.float64)[:, -1:]
    enough = kept.cumsum(-1, dtype=torch.float64) >= top_p * total
    reached = enough.any(-1, keepdim=True)
    first = enough.to(torch.int8).argmax(-1, keepdim=True)
    p_floor = torch.where(reached, highest.gather(1, first), k_floor)
    unlimited_p = top_p >= 1.0
    settled = torch.where(unlimited_p, all_k, reached & (all_k | (top_k >= weights.shape[1])))
    floor = torch.where(unlimited_p, k_floor, torch.maximum(p_floor, k_floor))
    return floor, settled | torch.full_like(settled, look == weights.shape[1])
