"""Every implementation against the oracle, and the oracle against torch's dense attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from workers.attention import softcap as softcap_module
from workers.attention.cpu import CpuAttention
from workers.attention.cpu_plan import CALL_COST_TOKENS, group_by_length
from workers.attention.interface import AttentionSpec, PagedAttention, PagedBatch, write_kv
from workers.attention.invariant import InvariantAttention
from workers.attention.reference import ReferenceAttention
from workers.attention.self_test import TOLERANCE, largest_difference, make_batch

CPU = torch.device("cpu")


def make_spec(
    heads: int = 4,
    kv_heads: int = 2,
    size: int = 16,
    dtype: torch.dtype = torch.float32,
    windows: tuple[int | None, ...] = (None,),
    softcap: float | None = None,
) -> AttentionSpec:
    return AttentionSpec(CPU, dtype, heads, kv_heads, 32, size, windows, softcap)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def run(attention: PagedAttention, batch: PagedBatch, spec: AttentionSpec, num_blocks: int = 300) -> list[Tensor]:
    """One result for each window of the spec, all from one prepared pass, as in a model that mixes layers."""
    cache = (num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
    query = draw(sum(batch.query_lens), spec.num_heads, spec.head_dim, seed=1).to(spec.dtype)
    keys, values = draw(*cache, seed=2).to(spec.dtype), draw(*cache, seed=3).to(spec.dtype)
    prepared = attention.prepare(batch)
    scale = spec.head_dim**-0.5
    return [
        prepared.attend(query, keys, values, scale=scale, window=window, softcap=spec.softcap)
        for window in spec.windows
    ]


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


@pytest.mark.parametrize("window", [1, 4, 7])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_the_reference_is_dense_attention_within_a_window_and_under_a_cap(window: int, softcap: float | None) -> None:
    spec = make_spec(6, 2, size=4)
    batch = make_batch(((11, 11),), spec, 3)
    query, key, value = draw(11, 6, 32, seed=1), draw(11, 2, 32, seed=2), draw(11, 2, 32, seed=3)
    keys, values = torch.zeros(3, 4, 2, 32), torch.zeros(3, 4, 2, 32)
    write_kv(key, value, keys, values, batch.slots)
    got = ReferenceAttention(spec).prepare(batch).attend(query, keys, values, scale=0.4, window=window, softcap=softcap)
    scores = torch.einsum("ihd,jhd->hij", query, key.repeat_interleave(3, 1)) * 0.4
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(11)[:, None] - torch.arange(11)
    scores.masked_fill_((distance < 0) | (distance >= window), -torch.inf)
    dense = torch.einsum("hij,jhd->ihd", scores.softmax(-1), value.repeat_interleave(3, 1))
    torch.testing.assert_close(got, dense, atol=1e-5, rtol=1e-5)


ON_CPUS = pytest.mark.parametrize("kind", [CpuAttention, InvariantAttention])


@ON_CPUS
@settings(max_examples=40, deadline=None)
@given(
    lens=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 70)), min_size=1, max_size=7),
    heads=st.sampled_from([(4, 4), (6, 2), (3, 1)]),
    size=st.sampled_from([1, 4, 16]),
    windows=st.lists(st.none() | st.integers(1, 80), min_size=1, max_size=3),
    softcap=st.none() | st.floats(0.5, 20.0),
    seed=st.integers(0, 2**16),
)
def test_kernels_for_cpus_agree_with_the_reference_on_any_ragged_batch(
    lens: list[tuple[int, int]],
    heads: tuple[int, int],
    size: int,
    windows: list[int | None],
    softcap: float | None,
    seed: int,
    kind: type[CpuAttention | InvariantAttention],
) -> None:
    spec = make_spec(*heads, size=size, windows=tuple(windows), softcap=softcap)
    batch = make_batch(tuple((rows, rows + before) for rows, before in lens), spec, num_blocks=600, seed=seed)
    got = run(kind(spec), batch, spec, num_blocks=600)
    torch.testing.assert_close(got, run(ReferenceAttention(spec), batch, spec, num_blocks=600), atol=1e-5, rtol=1e-5)


def test_cpu_agrees_when_decodes_fall_into_several_groups() -> None:
    spec = make_spec(windows=(None, 1000, 20))
    lens = ((1, 1500), (1, 3), (1, 1490), (40, 90), (1, 5), (1, 700))
    batch = make_batch(lens, spec, 300)
    decodes = [s for s, (rows, _) in enumerate(lens) if rows == 1]
    assert len(group_by_length(decodes, batch.key_lens)) > 1
    got = run(CpuAttention(spec), batch, spec)
    torch.testing.assert_close(got, run(ReferenceAttention(spec), batch, spec), atol=1e-5, rtol=1e-5)


def test_cpu_reads_adjacent_blocks_in_place_with_the_same_result() -> None:
    spec = make_spec(windows=(None, 10, 16, 17))
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


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 6])
@ON_CPUS
def test_what_a_row_does_not_see_does_not_matter(
    kind: type[CpuAttention | InvariantAttention], window: int | None, softcap: float | None
) -> None:
    """Other sequences' blocks, slots beyond a sequence's end, and keys that have left every row's window."""
    spec = make_spec(windows=(window,), softcap=softcap)
    batch = make_batch(((1, 21), (1, 40), (3, 9)), spec, 20)
    query = draw(5, spec.num_heads, spec.head_dim)
    keys, values = draw(20, 16, 2, 32, seed=2), draw(20, 16, 2, 32, seed=3)
    used = torch.zeros(20, 16, dtype=torch.bool)
    for table, rows, length in zip(batch.block_table.tolist(), batch.query_lens, batch.key_lens, strict=True):
        for position in range(0 if window is None else max(0, length - rows + 1 - window), length):
            used[table[position // 16], position % 16] = True

    def attend() -> Tensor:
        return kind(spec).prepare(batch).attend(query, keys, values, scale=0.2, window=window, softcap=softcap)

    before = attend()
    keys[~used], values[~used] = 1e4, -1e4
    torch.testing.assert_close(attend(), before, atol=1e-6, rtol=1e-6)


def test_a_softcapped_chunk_is_the_same_in_any_number_of_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec(windows=(None, 30), softcap=3.0)
    batch = make_batch(((40, 90), (1, 5)), spec, 300)
    whole = run(CpuAttention(spec), batch, spec)
    monkeypatch.setattr(softcap_module, "SCORES_PER_TILE", 4 * 90 * 7)
    torch.testing.assert_close(run(CpuAttention(spec), batch, spec), whole, atol=1e-6, rtol=1e-6)


Change = Callable[[dict[str, Any]], dict[str, Any]]


class Changed(CpuAttention):
    """Computes something else than it is asked for."""

    def __init__(self, spec: AttentionSpec, change: Change) -> None:
        super().__init__(spec)
        self._change = change

    def prepare(self, batch: PagedBatch) -> Any:
        inner, change = super().prepare(batch), self._change

        class Pass:
            def attend(self, query: Tensor, keys: Tensor, values: Tensor, **asked: Any) -> Tensor:
                return inner.attend(query, keys, values, **(asked | change(asked)))

        return Pass()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("windows", "cap", "change"),
    [
        ((None,), None, lambda asked: {"scale": asked["scale"] * 1.5}),
        ((None, 20), None, lambda asked: {"window": None}),
        ((None, 20), None, lambda asked: {"window": asked["window"] and asked["window"] + 1}),
        ((None,), 50.0, lambda asked: {"softcap": None}),
        ((12,), 50.0, lambda asked: {"window": 11}),
    ],
    ids=["scale", "no window", "a window of one more", "no cap", "a window of one less"],
)
def test_the_self_test_measures_a_real_difference(
    dtype: torch.dtype, windows: tuple[int | None, ...], cap: float | None, change: Change
) -> None:
    spec = make_spec(dtype=dtype, windows=windows, softcap=cap)
    assert largest_difference(CpuAttention(spec), spec) <= TOLERANCE[dtype]
    assert largest_difference(Changed(spec, change), spec) > TOLERANCE[dtype]


@given(st.lists(st.integers(1, 5_000), max_size=40))
def test_groups_partition_the_decodes_and_bound_the_padding(key_lens: list[int]) -> None:
    groups = group_by_length(range(len(key_lens)), key_lens)
    assert sorted(s for group in groups for s in group) == list(range(len(key_lens)))
    for group in groups:
        longest = key_lens[group[0]]
        assert sum(longest - key_lens[s] for s in group) <= CALL_COST_TOKENS
