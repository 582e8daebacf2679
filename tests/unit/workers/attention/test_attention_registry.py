"""Choosing an attention by name."""

from __future__ import annotations

import pytest
import torch

from headrace.errors import InvalidRequest
from workers.attention import registry
from workers.attention.interface import AttentionSpec, PagedBatch
from workers.attention.registry import IMPLEMENTATIONS, resolve_attention
from workers.config import ATTENTIONS

SPEC = AttentionSpec(torch.device("cpu"), torch.float32, num_heads=4, num_kv_heads=2, head_dim=16, block_size=8)


@pytest.mark.parametrize("name", ["cpu", "invariant", "reference"])
def test_a_name_gives_its_implementation(name: str) -> None:
    assert resolve_attention(name, SPEC).name == name


def test_the_settings_know_the_same_names() -> None:
    assert ("auto", *IMPLEMENTATIONS) == ATTENTIONS


def test_auto_takes_the_fastest_that_runs_here() -> None:
    assert resolve_attention("auto", SPEC).name == "cpu"


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(InvalidRequest) as raised:
        resolve_attention("flush", SPEC)
    assert raised.value.field == "attention"
    for name in ("auto", *IMPLEMENTATIONS):
        assert name in raised.value.message


@pytest.mark.parametrize("name", ["flash", "varlen"])
def test_a_gpu_kernel_says_why_it_cannot_run_on_the_cpu(name: str) -> None:
    with pytest.raises(InvalidRequest, match=r"cannot run here: .* needs a CUDA device, not cpu"):
        resolve_attention(name, SPEC)


def test_auto_passes_over_an_implementation_that_computes_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    from workers.attention import cpu

    class Zeros:
        def attend(self, query: torch.Tensor, *_: torch.Tensor, **asked: object) -> torch.Tensor:
            return torch.zeros_like(query)

    def prepare(self: cpu.CpuAttention, batch: PagedBatch) -> Zeros:
        return Zeros()

    monkeypatch.setattr(cpu.CpuAttention, "prepare", prepare)
    assert resolve_attention("auto", SPEC).name == "invariant"
    with pytest.raises(InvalidRequest, match="away from the reference"):
        resolve_attention("cpu", SPEC)


def test_auto_with_nothing_left_names_device_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "IMPLEMENTATIONS", {"varlen": IMPLEMENTATIONS["varlen"]})
    with pytest.raises(InvalidRequest, match=r"cpu in torch.float32"):
        resolve_attention("auto", SPEC)
