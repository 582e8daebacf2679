"""Log probabilities of the model's own distribution, beside chosen tokens and for the tokens of prompts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.logprobs import TokenLogprob
from workers.model.interface import ScoreSpec
from workers.sampling.blocks import highest
from workers.sampling.scratch import Scratch
from workers.sampling.weights import block_sums, weigh

PIECE_LOGITS = 1 << 22
"""Most logits looked at together: the copies made of them stay below about 100 MB, however long a prompt is."""


def logprobs(logits: Tensor, targets: Sequence[int], tops: Sequence[int]) -> list[TokenLogprob]:
    """One for every row of `logits` `[rows, vocabulary]`, of id `targets[row]` and of the `tops[row]` likeliest ids.
    Rows must be finite at their peak and have no NaN; targets lie within the vocabulary. Accurate to about 1e-6.
    """
    rows = max(1, PIECE_LOGITS // logits.shape[1])
    told: list[TokenLogprob] = []
    for first in range(0, len(targets), rows):
        piece = slice(first, first + rows)
        told += _of_piece(logits[piece].float(), targets[piece], tops[piece])
    return told


def scores(logits: Tensor, spec: ScoreSpec) -> tuple[TokenLogprob, ...] | None:
    """One for every target of `spec`, from the rows of `logits` that predict them; None where any row is unusable."""
    if not torch.isfinite(logits.amax(-1)).all():
        return None
    return tuple(logprobs(logits, spec.targets, (spec.top,) * len(spec.targets)))


def _of_piece(logits: Tensor, targets: Sequence[int], tops: Sequence[int]) -> list[TokenLogprob]:
    target = torch.tensor(targets, device=logits.device)[:, None]
    value = logits.gather(1, target)
    rank = 1 + _ahead(logits, value, target)
    peak = logits.amax(-1, keepdim=True)
    total = block_sums(weigh(logits - peak), Scratch(logits.device)).sum(-1, keepdim=True)
    width = min(max(tops), logits.shape[1])
    best, best_ids = highest(logits, width) if width else (value[:, :0], target[:, :0])
    # One float64 table for one move to the host: ids and ranks are far below 2**53.
    chosen = (torch.cat((value, best), 1) - peak).double() - total.log()
    table = torch.cat((rank.double(), chosen, best_ids.double()), 1).tolist()
    return [_told(line, width, top) for line, top in zip(table, tops, strict=True)]


def _ahead(logits: Tensor, value: Tensor, target: Tensor) -> Tensor:
    """How many ids come before the target, `[rows, 1]`: higher logits, and equal ones with a lower id. Comparisons are
    written as 0.0 and 1.0, which is several times as fast on the CPU as booleans, and exact up to 2**24 ids.
    """
    ids = torch.arange(logits.shape[1], device=logits.device)
    higher = torch.gt(logits, value, out=torch.empty_like(logits))
    equal = torch.eq(logits, value, out=torch.empty_like(logits))
    return higher.addcmul_(equal, (ids < target).float()).sum(-1, keepdim=True)


def _told(line: Sequence[float], width: int, top: int) -> TokenLogprob:
    count = min(top, width)
    values, ids = line[2 : 2 + count], line[2 + width : 2 + width + count]
    return TokenLogprob(line[1], int(line[0]), tuple((int(i), value) for i, value in zip(ids, values, strict=True)))
