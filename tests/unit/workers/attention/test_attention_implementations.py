"""Every implementation against the oracle, and the oracle against torch's dense attention."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from workers.attention.cpu import CALL_COST_TOKENS, CpuAttention, group_by_length
from workers.attention.interface import AttentionSpec, PagedAttention, PagedBatch, write_kv
from workers.attention.reference import ReferenceAttention
from workers.attention.self_test import TOLERANCE, largest_difference, make_batch

CPU = torch.device("cpu")


def make_spec(heads: int = 4, kv_heads: int = 2, size: int = 16, dtype: torch.dtype = torch.float32) -> AttentionSpec:
    return AttentionSpec(CPU, dtype, heads, kv_heads, head_dim=32, block_size=size)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def run(attention: PagedAttention, batch: PagedBatch, spec: AttentionSpec, num_blocks: int = 300) -> Tensor:
    cache = (num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
    query = draw(sum(batch.query_lens), spec.num_heads, spec.head_dim, seed=1).to(spec.dtype)
    keys, values = draw(*cache, seed=2).to(spec.dtype), draw(*cache, seed=3).to(spec.dtype)
    return attention.prepare(batch).attend(query, keys, values, scale=spec.head_dim**-0.5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_the_reference_is_dense_causal_attention(heads: int, kv_heads: int) -> None:
    """Keys and values written through `write_kv` in two chunks, read back by the oracle, equal one dense call."""
    spec = make_spec(heads, kv_heads, size=4)
    whole, second = make_batch(((11, 11),), spec, 9), make_batch(((5, 11),), spec, 9)
    assert torch.equal(whole.slots[6:], second.slots)
    query, key, value = draw(11, heads, 32, seed=1), draw(11, kv_heads, 32, seed=2), draw(11, kv_heads, 32, seed=3)
    keys, values = torch.zeros(9, 4, kv_heads, 32), torch.zeros(9, 4, kv_heads, 32)
    write_kv(key[:6], value[:6], keys, values, whole.slots[:6])
    write_kv(key[6:], value[6:], keys, values, second.slots)
    got = ReferenceAttention(spec).prepare(second).attend(query[6:], keys, values, scale=32**-0.5)
    dense = scaled_dot_product_attention(
        query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(got, dense.transpose(0, 1)[6:], atol=1e-5, rtol=1e-5)


@settings(max_examples=25, deadline=None)
@given(
    lens=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 70)), min_size=1, max_size=7),
    heads=st.sampled_from([(4, 4), (6, 2), (3, 1)]),
    size=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 2**16),
)
def test_cpu_agrees_with_the_reference_on_any_ragged_batch(
    lens: list[tuple[int, int]], heads: tuple[int, int], size: int, seed: int
) -> None:
    spec = make_spec(*heads, size=size)
    batch = make_batch(tuple((rows, rows + before) for rows, before in lens), spec, num_blocks=600, seed=seed)
    got = run(CpuAttention(spec), batch, spec, num_blocks=600)
    torch.testing.assert_close(got, run(ReferenceAttention(spec), batch, spec, num_blocks=600), atol=1e-5, rtol=1e-5)


def test_cpu_agrees_when_decodes_fall_into_several_groups() -> None:
    spec = make_spec()
    lens = ((1, 1500), (1, 3), (1, 1490), (40, 90), (1, 5), (1, 700))
    batch = make_batch(lens, spec, 300)
    decodes = [s for s, (rows, _) in enumerate(lens) if rows == 1]
    assert len(group_by_length(decodes, batch.key_lens)) > 1
    got = run(CpuAttention(spec), batch, spec)
    torch.testing.assert_close(got, run(ReferenceAttention(spec), batch, spec), atol=1e-5, rtol=1e-5)


def test_cpu_reads_adjacent_blocks_in_place_with_the_same_result() -> None:
    spec = make_spec()
    scattered = make_batch(((1, 100), (7, 33)), spec, 300)
    adjacent = PagedBatch(
        scattered.query_lens,
        scattered.key_lens,
        scattered.cu_seqlens_q,
        scattered.seqused_k,
        torch.tensor([[5, 6, 7, 8, 9, 10, 11], [20, 21, 22, 20, 20, 20, 20]], dtype=torch.int32),
        scattered.slots,
    )
    got = run(CpuAttention(spec), adjacent, spec)
    torch.testing.assert_close(got, run(ReferenceAttention(spec), adjacent, spec), atol=1e-5, rtol=1e-5)


def test_the_workspace_serves_a_small_pass_after_a_large_one() -> None:
    spec = make_spec()
    attention = CpuAttention(spec)
    for lens in (((1, 900), (1, 850)), ((1, 20), (1, 31)), ((9, 400),)):
        batch = make_batch(lens, spec, 300)
        got = run(attention, batch, spec)
        torch.testing.assert_close(got, run(ReferenceAttention(spec), batch, spec), atol=1e-5, rtol=1e-5)


def test_slots_beyond_a_sequence_and_other_sequences_blocks_do_not_matter() -> None:
    spec = make_spec()
    batch = make_batch(((1, 21), (1, 40), (3, 9)), spec, 20)
    query = draw(5, spec.num_heads, spec.head_dim)
    keys, values = draw(20, 16, 2, 32, seed=2), draw(20, 16, 2, 32, seed=3)
    used = torch.zeros(20, 16, dtype=torch.bool)
    for table, length in zip(batch.block_table.tolist(), batch.key_lens, strict=True):
        for position in range(length):
            used[table[position // 16], position % 16] = True
    before = CpuAttention(spec).prepare(batch).attend(query, keys, values, scale=0.2)
    keys[~used], values[~used] = 1e4, -1e4
    after = CpuAttention(spec).prepare(batch).attend(query, keys, values, scale=0.2)
    torch.testing.assert_close(after, before, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_self_test_measures_a_real_difference(dtype: torch.dtype) -> None:
    spec = make_spec(dtype=dtype)
    assert largest_difference(CpuAttention(spec), spec) <= TOLERANCE[dtype]

    class OffByOneScale(CpuAttention):
        def prepare(self, batch: PagedBatch) -> object:  # type: ignore[override]
            inner = super().prepare(batch)

            class Wrong:
                def attend(self, query: Tensor, keys: Tensor, values: Tensor, *, scale: float) -> Tensor:
                    return inner.attend(query, keys, values, scale=scale * 1.5)

            return Wrong()

    assert largest_difference(OffByOneScale(spec), spec) > TOLERANCE[dtype]


@given(st.lists(st.integers(1, 5_000), max_size=40))
def test_groups_partition_the_decodes_and_bound_the_padding(key_lens: list[int]) -> None:
    groups = group_by_length(range(len(key_lens)), key_lens)
    assert sorted(s for group in groups for s in group) == list(range(len(key_lens)))
    for group in groups:
        longest = key_lens[group[0]]
        assert sum(longest - key_lens[s] for s in group) <= CALL_COST_TOKENS
