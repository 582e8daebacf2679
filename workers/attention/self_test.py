"""The check an implementation passes before it may serve: a small ragged batch against the oracle."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.attention.interface import AttentionSpec, PagedAttention, PagedBatch
from workers.attention.reference import ReferenceAttention

QUERY_AND_KEY_LENS = ((1, 1), (1, 37), (1, 33), (5, 5), (7, 40), (1, 16))
LONGEST_WINDOW = 4096
"""Longer windows are tried at this length: the oracle is slow."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}


def make_batch(lens: tuple[tuple[int, int], ...], spec: AttentionSpec, num_blocks: int, seed: int = 0) -> PagedBatch:
    """A batch of (query rows, keys) per sequence over shuffled blocks of a pool that must be large enough."""
    generator = torch.Generator().manual_seed(seed)
    free = torch.randperm(num_blocks, generator=generator, dtype=torch.int32).tolist()
    tables = [[free.pop() for _ in range(-(-keys // spec.block_size))] for _, keys in lens]
    width = max(len(table) for table in tables)
    block_table = torch.tensor([table + table[:1] * (width - len(table)) for table in tables], dtype=torch.int32)
    slots = [
        table[position // spec.block_size] * spec.block_size + position % spec.block_size
        for (rows, keys), table in zip(lens, tables, strict=True)
        for position in range(keys - rows, keys)
    ]
    query_lens, key_lens = zip(*lens, strict=True)
    cumulative = torch.tensor((0, *query_lens)).cumsum(0).to(torch.int32)
    return PagedBatch(
        query_lens=query_lens,
        key_lens=key_lens,
        cu_seqlens_q=cumulative.to(spec.device),
        seqused_k=torch.tensor(key_lens, dtype=torch.int32, device=spec.device),
        block_table=block_table.to(spec.device),
        slots=torch.tensor(slots, device=spec.device),
    )


def largest_difference(attention: PagedAttention, spec: AttentionSpec) -> float:
    """The largest absolute difference from the oracle on random data of unit variance, over the windows and with the
    soft cap that the spec names; NaN counts as infinite."""
    return max(_difference(attention, spec, window) for window in spec.windows)


def _difference(attention: PagedAttention, spec: AttentionSpec, window: int | None) -> float:
    lens: tuple[tuple[int, int], ...] = QUERY_AND_KEY_LENS
    if window is not None:
        window = min(window, LONGEST_WINDOW)
        lens += ((1, window), (1, window + 1), (1, window + 21), (6, window + 3), (3, window + 40))
    num_blocks = 2 * sum(-(-keys // spec.block_size) for _, keys in lens)
    batch = make_batch(lens, spec, num_blocks)
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(spec.device, spec.dtype)

    query = draw(sum(batch.query_lens), spec.num_heads, spec.head_dim)
    cache = (num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
    keys, values = draw(*cache), draw(*cache)
    # Scores of half the cap's size: ordinary ones, near 1, would pass a cap of 50 almost unchanged.
    scale = spec.head_dim**-0.5 * (1.0 if spec.softcap is None else spec.softcap / 2)
    got, wanted = (
        kind.prepare(batch).attend(query, keys, values, scale=scale, window=window, softcap=spec.softcap)
        for kind in (attention, ReferenceAttention(spec))
    )
    difference = (got.float() - wanted.float()).abs().max()
    return float(difference) if bool(torch.isfinite(difference)) else float("inf")
