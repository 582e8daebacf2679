"""Attention with soft-capped scores, written out: torch's fused kernels for CPUs do not know the cap."""

from __future__ import annotations

import torch
from torch import Tensor

SCORES_PER_TILE = 1 << 22
"""Scores held at once: 16 MiB in float32."""


def softcapped_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, *, scale: float, softcap: float
) -> Tensor:
    """`query` `[sequences, kv_heads, group, rows, head_dim]`, keys and values `[sequences, kv_heads, num_keys,
    head_dim]`, `mask` of a shape that broadcasts to `[sequences, kv_heads, group, rows, num_keys]`. Returns the shape
    and dtype of the query; scores are float32, as a bfloat16 score of 50 would be off by an eighth.
    """
    keys_t, values_f = keys.float().transpose(-1, -2), values.float()
    out = torch.empty_like(query)
    num_rows, num_keys = query.shape[3], keys.shape[2]
    tile = max(1, SCORES_PER_TILE // (query.shape[0] * query.shape[1] * query.shape[2] * num_keys))
    for begin in range(0, num_rows, tile):
        part = slice(begin, min(begin + tile, num_rows))
        rows = query[:, :, :, part].float()
        scores = (rows.flatten(2, 3) @ keys_t).mul_(scale / softcap).tanh_().mul_(softcap)
        if mask is not None:
            scores.view(*rows.shape[:4], num_keys).add_(mask if mask.shape[-2] == 1 else mask[..., part, :])
        out[:, :, :, part] = (torch.softmax(scores, -1) @ values_f).view(rows.shape).to(query.dtype)
    return out
