"""From slices to tensors: the ragged rows of one pass, flattened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from workers.attention.interface import PagedBatch
from workers.model.interface import SequenceSlice


@dataclass(frozen=True)
class Rows:
    """Inputs of one pass; `[rows]` are the tokens of all slices, one after the other."""

    input_ids: Tensor
    """int64 `[1, rows]`."""
    positions: Tensor
    """int64 `[1, rows]`."""
    sampled_rows: Tensor
    """int64: the last row of every slice that samples, in slice order."""
    batch: PagedBatch


def flatten(slices: Sequence[SequenceSlice], block_size: int, device: torch.device) -> Rows:
    """Everything is computed on the host and moved once. Block tables must be long enough for every row."""
    query_lens = tuple(len(s.token_ids) for s in slices)
    key_lens = tuple(s.start + n for s, n in zip(slices, query_lens, strict=True))
    ends = list(accumulate(query_lens))
    lens = torch.tensor(query_lens)
    begins = torch.tensor([0, *ends[:-1]])
    owner = torch.repeat_interleave(torch.arange(len(slices)), lens)
    starts = torch.tensor([s.start for s in slices])
    positions = torch.arange(ends[-1]) + (starts - begins)[owner]
    tables = _block_table(slices, key_lens, block_size)
    slots = tables[owner, positions // block_size].long() * block_size + positions % block_size
    input_ids = torch.tensor(list(chain.from_iterable(s.token_ids for s in slices)))
    sampled = torch.tensor([end - 1 for s, end in zip(slices, ends, strict=True) if s.sample], dtype=torch.int64)
    batch = PagedBatch(
        query_lens=query_lens,
        key_lens=key_lens,
        cu_seqlens_q=torch.tensor([0, *ends], dtype=torch.int32).to(device),
        seqused_k=torch.tensor(key_lens, dtype=torch.int32).to(device),
        block_table=tables.to(device),
        slots=slots.to(device),
    )
    return Rows(input_ids[None].to(device), positions[None].to(device), sampled.to(device), batch)


def _block_table(slices: Sequence[SequenceSlice], key_lens: Sequence[int], block_size: int) -> Tensor:
    """int32 `[sequences, widest]`, cut to the blocks that hold keys and filled up with each sequence's own first
    block.
    """
    used = [s.block_ids[: -(-n // block_size)] for s, n in zip(slices, key_lens, strict=True)]
    width = max(map(len, used))
    return torch.tensor([(*ids, *ids[:1] * (width - len(ids))) for ids in used], dtype=torch.int32)
