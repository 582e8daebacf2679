"""Rows of a vocabulary seen as blocks of ids: one cheap pass finds the few blocks where the rest of the work is."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128
"""Ids per block; near the square root of a vocabulary, so that blocks and ids within one are about as many. The
vocabularies of most models are whole multiples."""


def in_blocks(rows: Tensor, fill: float) -> Tensor:
    """`[rows, vocabulary]` as `[rows, blocks, BLOCK]`: a view where the vocabulary fills its blocks, else a copy with
    `fill` behind the last id.
    """
    missing = -rows.shape[1] % BLOCK
    if missing:
        rows = torch.nn.functional.pad(rows, (0, missing), value=fill)
    return rows.unflatten(1, (-1, BLOCK))


def peaks(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The highest value of every row and the lowest id that has it, `[rows]` each. A row with a NaN has the peak NaN
    and any id.
    """
    blocks = in_blocks(rows, -torch.inf)
    block = blocks.amax(-1).max(-1, keepdim=True).indices
    peak, within = blocks.gather(1, block[..., None].expand(-1, -1, BLOCK)).max(-1)
    return peak[:, 0], (block * BLOCK + within)[:, 0]


def highest(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` highest values of every row and their ids, `[rows, count]` each: the highest first, ties to the lower
    id. `rows` is float32 without NaN.

    The ids asked for lie in the `count` blocks with the highest peaks (ties to the lower block): any id elsewhere comes
    after one id of each of those.
    """
    values, ids = rows, torch.arange(rows.shape[1], device=rows.device).expand_as(rows)
    blocks = in_blocks(rows, -torch.inf)
    if 2 * count < blocks.shape[1]:
        leading = _order(blocks.amax(-1)).topk(count, dim=-1).indices.sort(-1).values
        values = blocks.gather(1, leading[..., None].expand(-1, -1, BLOCK)).flatten(1)
        ids = (leading[..., None] * BLOCK + torch.arange(BLOCK, device=rows.device)).flatten(1)
    found = _order(values).topk(count, dim=-1).indices
    return values.gather(1, found), ids.gather(1, found)


def _order(values: Tensor) -> Tensor:
    """int64 keys without equals: larger for higher values, and among equal ones for lower columns."""
    bits = (values + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0, its equal
    rising = bits ^ (bits >> 31 & 0x7FFFFFFF)
    columns = torch.arange(values.shape[1], 0, -1, device=values.device)
    return (rising.long() << 32) + columns


def threshold(rows: Tensor, count: Tensor) -> Tensor:
    """The count-th highest value of every row, `[rows, 1]`; `count` is int64 `[rows, 1]`, from 1 to the vocabulary."""
    most = int(count.max())
    blocks = in_blocks(rows, -torch.inf)
    values = rows
    if 2 * most < blocks.shape[1]:
        leading = blocks.amax(-1).topk(most, dim=-1).indices
        values = blocks.gather(1, leading[..., None].expand(-1, -1, BLOCK)).flatten(1)
    return values.topk(most, dim=-1).values.gather(1, count - 1)
