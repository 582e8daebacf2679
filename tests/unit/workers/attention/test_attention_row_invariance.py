"""A row of the invariant attention has the same bits whatever is computed beside it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from workers.attention import invariant
from workers.attention.interface import AttentionSpec, PagedBatch
from workers.attention.invariant import KEY_SPLIT, InvariantAttention

TOKENS = 2 * KEY_SPLIT + 45
BLOCK_SIZE = 16
NUM_BLOCKS = 64
SEEN = pytest.mark.parametrize(
    ("window", "softcap"), [(None, None), (100, None), (KEY_SPLIT + 3, None), (37, 30.0)], ids=str
)


class OneSequence:
    """Queries, keys and values of one sequence in a pool of blocks that are not in order."""

    def __init__(self, dtype: torch.dtype, num_heads: int = 6, num_kv_heads: int = 2) -> None:
        torch.manual_seed(0)
        self.spec = AttentionSpec(torch.device("cpu"), dtype, num_heads, num_kv_heads, 32, BLOCK_SIZE)
        shape = (NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, 32)
        self.keys, self.values = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
        self.query = torch.randn(TOKENS, num_heads, 32).to(dtype)
        self.blocks = torch.randperm(NUM_BLOCKS)[: -(-TOKENS // BLOCK_SIZE)].tolist()
        self.attention = InvariantAttention(self.spec)

    def attend(self, pieces: Sequence[tuple[int, int]], window: int | None, softcap: float | None) -> Tensor:
        """Rows `start : end` for each piece, all in one pass."""
        tables = [self.blocks[: -(-end // BLOCK_SIZE)] for _, end in pieces]
        width = max(map(len, tables))
        rows = torch.cat([torch.arange(start, end) for start, end in pieces])
        lens = tuple(end - start for start, end in pieces)
        ends = tuple(end for _, end in pieces)
        batch = PagedBatch(
            query_lens=lens,
            key_lens=ends,
            cu_seqlens_q=torch.tensor((0, *lens)).cumsum(0).int(),
            seqused_k=torch.tensor(ends, dtype=torch.int32),
            block_table=torch.tensor([t + t[:1] * (width - len(t)) for t in tables], dtype=torch.int32),
            slots=torch.empty(0, dtype=torch.int64),
        )
        planned = self.attention.prepare(batch)
        return planned.attend(self.query[rows], self.keys, self.values, scale=32**-0.5, window=window, softcap=softcap)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def sequence(request: pytest.FixtureRequest) -> OneSequence:
    return OneSequence(request.param)


@SEEN
@pytest.mark.parametrize("chunk", [1, 7, 16, 100])
def test_chunks_have_the_bits_of_the_whole(
    chunk: int, window: int | None, softcap: float | None, sequence: OneSequence
) -> None:
    whole = sequence.attend([(0, TOKENS)], window, softcap)
    starts = range(0, TOKENS, chunk) if chunk > 1 else range(0, TOKENS, 13)
    for start in starts:
        end = min(TOKENS, start + chunk)
        assert torch.equal(sequence.attend([(start, end)], window, softcap), whole[start:end]), start


@SEEN
def test_neighbours_change_nothing(window: int | None, softcap: float | None, sequence: OneSequence) -> None:
    whole = sequence.attend([(0, TOKENS)], window, softcap)
    pieces = [(p, p + 1) for p in (0, 5, TOKENS - 1, 150, 17, KEY_SPLIT - 1, KEY_SPLIT, 200)] + [(70, 120)]
    together = sequence.attend(pieces, window, softcap)
    alone = torch.cat([whole[start:end] for start, end in pieces])
    assert torch.equal(together, alone)


def test_cutting_a_wide_chunk_changes_nothing(sequence: OneSequence, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sequence.attend([(0, TOKENS)], None, None)
    monkeypatch.setattr(invariant, "SCORES_AT_ONCE", 6 * 400 * 9)
    assert torch.equal(sequence.attend([(0, TOKENS)], None, None), whole)
