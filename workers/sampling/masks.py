"""What may not come at all: ids outside a row's grammar, as packed bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.model.interface import SampleSpec

WORD_BITS = 32


def mask_rows(specs: Sequence[SampleSpec]) -> list[int]:
    """Indices of the rows that have a grammar."""
    return [row for row, spec in enumerate(specs) if spec.grammar is not None]


def packed_masks(specs: Sequence[SampleSpec], rows: Sequence[int], vocabulary: int, device: torch.device) -> Tensor:
    """int32 `[rows, ceil(vocabulary / 32)]`, filled on the host by each row's grammar and moved at once."""
    words = -(-vocabulary // WORD_BITS)
    packed = torch.zeros((len(rows), words), dtype=torch.int32, pin_memory=device.type == "cuda")
    lines = packed.numpy()
    for line, row in enumerate(rows):
        grammar = specs[row].grammar
        if grammar is not None:
            grammar.fill_mask(lines[line].data)
    return packed.to(device, non_blocking=True)


def apply_masks(logits: Tensor, packed: Tensor) -> Tensor:
    """`logits` `[rows, vocabulary]` with every id at -inf whose bit (bit id % 32 of word id // 32) is 0."""
    shifts = torch.arange(WORD_BITS, dtype=torch.int32, device=logits.device)
    allowed = (packed[..., None] >> shifts).bitwise_and_(1).flatten(1)[:, : logits.shape[1]].bool()
    return logits.masked_fill(allowed.logical_not_(), -torch.inf)
