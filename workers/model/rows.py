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
    kept: Tensor
    """int64: the rows whose logits are needed, slice by slice: those to be scored, then the last one to sample from; of
    a chunk with neither the last one too, to see that its numbers are sound."""
    scored: tuple[slice, ...]
    """For every slice, which of the kept rows are its rows to be scored."""
    sampled: tuple[int, ...]
    """Which of the kept rows are sampled from, in slice order."""
    watched: dict[int, int]
    """Which of the kept rows is only looked at, by slice."""
    batch: PagedBatch

    def sampled_of(self, kept_logits: Tensor) -> Tensor:
        """`[sampled, vocabulary]` of `[kept, vocabulary]`."""
        if len(self.sampled) == len(self.kept):
            return kept_logits
        return kept_logits.index_select(0, torch.tensor(self.sampled, dtype=torch.int64, device=kept_logits.device))


def flatten(
    slices: Sequence[SequenceSlice], block_size: int, device: torch.device, scratch_block: int | None = None
) -> Rows:
    """Everything is computed on the host and moved once. Block tables must be long enough for every row. What stands
    on the scratch block is not looked at.
    """
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
    kept, scored, sampled, watched = _kept_rows(slices, ends, scratch_block)
    batch = PagedBatch(
        query_lens=query_lens,
        key_lens=key_lens,
        cu_seqlens_q=torch.tensor([0, *ends], dtype=torch.int32).to(device),
        seqused_k=torch.tensor(key_lens, dtype=torch.int32).to(device),
        block_table=tables.to(device),
        slots=slots.to(device),
    )
    return Rows(
        input_ids[None].to(device), positions[None].to(device), kept.to(device), scored, sampled, watched, batch
    )


def _kept_rows(
    slices: Sequence[SequenceSlice], ends: Sequence[int], scratch_block: int | None
) -> tuple[Tensor, tuple[slice, ...], tuple[int, ...], dict[int, int]]:
    kept: list[int] = []
    scored, sampled = [], []
    watched: dict[int, int] = {}
    for place, (piece, end) in enumerate(zip(slices, ends, strict=True)):
        count = 0 if piece.score is None else len(piece.score.targets)
        begin = end - len(piece.token_ids)
        scored.append(slice(len(kept), len(kept) + count))
        kept += range(begin, begin + count)
        if piece.sample is not None:
            sampled.append(len(kept))
            kept.append(end - 1)
        elif count == 0 and piece.block_ids[0] != scratch_block:
            watched[place] = len(kept)
            kept.append(end - 1)
    return torch.tensor(kept, dtype=torch.int64), tuple(scored), tuple(sampled), watched


def _block_table(slices: Sequence[SequenceSlice], key_lens: Sequence[int], block_size: int) -> Tensor:
    """int32 `[sequences, widest]`, cut to the blocks that hold keys and filled up with each sequence's own first
    block.
    """
    used = [s.block_ids[: -(-n // block_size)] for s, n in zip(slices, key_lens, strict=True)]
    width = max(map(len, used))
    return torch.tensor([(*ids, *ids[:1] * (width - len(ids))) for ids in used], dtype=torch.int32)
