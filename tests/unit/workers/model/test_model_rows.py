"""Flattening slices into the tensors of one pass."""

from __future__ import annotations

import torch

from headrace.sampling import SamplingParams
from workers.model.interface import SampleSpec, SequenceSlice
from workers.model.rows import flatten

SAMPLE = SampleSpec(SamplingParams(max_tokens=1), seed=0, choice=0, token_index=0)


def test_rows_of_a_decode_a_middle_chunk_and_a_whole_prompt() -> None:
    slices = (
        SequenceSlice((70,), 9, (5, 2, 8), SAMPLE),
        SequenceSlice((10, 11, 12), 3, (7, 1, 6, 4), None),
        SequenceSlice((20, 21), 0, (3,), SAMPLE),
    )
    rows = flatten(slices, block_size=4, device=torch.device("cpu"))
    assert rows.input_ids.tolist() == [[70, 10, 11, 12, 20, 21]]
    assert rows.positions.tolist() == [[9, 3, 4, 5, 0, 1]]
    assert (rows.kept.tolist(), rows.sampled, rows.watched) == ([0, 3, 5], (0, 2), {1: 1})
    batch = rows.batch
    assert (batch.query_lens, batch.key_lens) == ((1, 3, 2), (10, 6, 2))
    assert batch.cu_seqlens_q.tolist() == [0, 1, 4, 6]
    assert batch.seqused_k.tolist() == [10, 6, 2]
    # Cut to the blocks that hold keys, short rows filled up with their own first block.
    assert batch.block_table.tolist() == [[5, 2, 8], [7, 1, 7], [3, 3, 3]]
    assert batch.slots.tolist() == [8 * 4 + 1, 7 * 4 + 3, 1 * 4 + 0, 1 * 4 + 1, 3 * 4 + 0, 3 * 4 + 1]


def test_types_are_those_kernels_ask_for() -> None:
    rows = flatten((SequenceSlice((1,), 0, (0,), None),), 16, torch.device("cpu"), scratch_block=0)
    assert rows.kept.numel() == 0, "nobody looks at what stands on the scratch block"
    assert rows.batch.cu_seqlens_q.dtype == rows.batch.seqused_k.dtype == rows.batch.block_table.dtype == torch.int32
    assert rows.input_ids.dtype == rows.positions.dtype == rows.batch.slots.dtype == torch.int64
