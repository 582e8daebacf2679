"""The oracle: one query row at a time, in float32, with nothing clever. Every other implementation is tested against
it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.attention.interface import AttentionSpec, PagedBatch


class ReferenceAttention:
    """Runs anywhere, slowly."""

    name = "reference"

    def __init__(self, spec: AttentionSpec) -> None:
        self._block_size = spec.block_size

    def prepare(self, batch: PagedBatch) -> ReferencePass:
        return ReferencePass(batch, self._block_size)


@dataclass(frozen=True)
class ReferencePass:
    batch: PagedBatch
    block_size: int

    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        group = query.shape[1] // key_cache.shape[2]
        out = torch.empty_like(query)
        row = 0
        for sequence, (num_rows, num_keys) in enumerate(zip(self.batch.query_lens, self.batch.key_lens, strict=True)):
            blocks = self.batch.block_table[sequence].tolist()
            places = [(blocks[i // self.block_size], i % self.block_size) for i in range(num_keys)]
            keys = torch.stack([key_cache[block, offset] for block, offset in places]).float()
            values = torch.stack([value_cache[block, offset] for block, offset in places]).float()
            for i in range(num_rows):
                end = num_keys - num_rows + i + 1
                seen = slice(0 if window is None else max(0, end - window), end)
                for head in range(query.shape[1]):
                    scores = keys[seen, head // group] @ query[row, head].float() * scale
                    if softcap is not None:
                        scores = softcap * torch.tanh(scores / softcap)
                    out[row, head] = (torch.softmax(scores, 0) @ values[seen, head // group]).to(query.dtype)
                row += 1
        return out
