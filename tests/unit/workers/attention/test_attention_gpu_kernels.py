"""The two adapters of GPU kernels, over stand-ins that compute on the CPU what the kernels' documentation says.

What only a GPU can show (that the kernels do what they document) the self-test at every start does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from workers.attention.flash import FlashAttention
from workers.attention.interface import AttentionSpec, AttentionUnavailable, PagedBatch
from workers.attention.reference import ReferenceAttention
from workers.attention.self_test import TOLERANCE, largest_difference, make_batch
from workers.attention.varlen import VarlenAttention

ON_CUDA = AttentionSpec(torch.device("cuda"), torch.bfloat16, 6, 2, 32, 16)
CPU = torch.device("cpu")


def attend_as_documented(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    cu_seqlens_q: Tensor,
    key_lens: Tensor,
    block_table: Tensor,
    window_size: tuple[int, int],
    scale: float,
    softcap: float | None,
) -> Tensor:
    """FlashAttention's rule: row i sees the keys from i - left to i + right; -1 is no bound."""
    left, right = window_size
    assert right == 0
    query_lens = tuple((cu_seqlens_q[1:] - cu_seqlens_q[:-1]).tolist())
    batch = PagedBatch(
        query_lens, tuple(key_lens.tolist()), cu_seqlens_q, key_lens, block_table, torch.empty(0, dtype=torch.int64)
    )
    oracle = ReferenceAttention(replace(ON_CUDA, device=CPU, block_size=keys.shape[1])).prepare(batch)
    window = None if left == -1 else left + 1
    return oracle.attend(query, keys, values, scale=scale, window=window, softcap=softcap)


def paged_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Tensor,
    block_table: Tensor,
    num_splits: int,
) -> Tensor:
    assert cu_seq_k is None
    assert (max_q, max_k) == (int((cu_seq_q[1:] - cu_seq_q[:-1]).max()), int(seqused_k.max()))
    assert enable_gqa == (query.shape[1] != key.shape[2])
    assert num_splits == 1
    return attend_as_documented(query, key, value, cu_seq_q, seqused_k, block_table, window_size, scale, None)


def vllms_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    seqused_k: Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    block_table: Tensor,
    softcap: float = 0.0,
) -> Tensor:
    assert causal
    assert max_seqlen_k == int(seqused_k.max())
    cap = softcap or None
    return attend_as_documented(q, k, v, cu_seqlens_q, seqused_k, block_table, window_size, softmax_scale, cap)


def older_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    block_table: Tensor,
) -> Tensor:
    """Lengths as sums, and no soft cap."""
    lens = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
    return attend_as_documented(q, k, v, cu_seqlens_q, lens, block_table, window_size, softmax_scale, None)


def install(monkeypatch: pytest.MonkeyPatch, kernel: Callable[..., Any], package: str = "vllm_flash_attn") -> None:
    module = ModuleType(package)
    module.flash_attn_varlen_func = kernel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, package, module)


def difference(attention: Any, spec: AttentionSpec) -> float:
    """The adapter was told CUDA; its data stay on the CPU, where the stand-in is."""
    return largest_difference(attention, replace(spec, device=CPU))


@pytest.mark.parametrize("windows", [(None,), (None, 20), (7,)])
def test_varlen_passes_windows_on(monkeypatch: pytest.MonkeyPatch, windows: tuple[int | None, ...]) -> None:
    spec = replace(ON_CUDA, windows=windows)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", paged_varlen)
    assert difference(VarlenAttention(spec), spec) <= TOLERANCE[torch.bfloat16]


def test_varlen_has_no_soft_cap() -> None:
    with pytest.raises(AttentionUnavailable, match="knows no soft cap"):
        VarlenAttention(replace(ON_CUDA, softcap=50.0))


def test_varlen_that_is_asked_for_a_cap_all_the_same_says_so() -> None:
    batch = make_batch(((1, 3),), replace(ON_CUDA, device=CPU), 4)
    prepared = VarlenAttention(ON_CUDA).prepare(batch)
    with pytest.raises(NotImplementedError, match="no soft cap"):
        prepared.attend(torch.empty(1, 6, 32), torch.empty(1), torch.empty(1), scale=1.0, softcap=50.0)


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("windows", [(None,), (None, 20), (7,)])
def test_flash_passes_windows_and_caps_on(
    monkeypatch: pytest.MonkeyPatch, windows: tuple[int | None, ...], softcap: float | None
) -> None:
    install(monkeypatch, vllms_kernel)
    spec = replace(ON_CUDA, windows=windows, softcap=softcap)
    assert difference(FlashAttention(spec), spec) <= TOLERANCE[torch.bfloat16]


def test_flash_of_an_older_signature_gets_sums_and_refuses_caps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm_flash_attn", None)
    install(monkeypatch, older_kernel, "flash_attn")
    spec = replace(ON_CUDA, windows=(None, 9), block_size=256)
    assert difference(FlashAttention(spec), spec) <= TOLERANCE[torch.bfloat16]
    with pytest.raises(AttentionUnavailable, match="installed flash_attn knows no soft cap"):
        FlashAttention(replace(spec, softcap=30.0))
    with pytest.raises(AttentionUnavailable, match="multiple of 256, not 16"):
        FlashAttention(replace(spec, block_size=16))
