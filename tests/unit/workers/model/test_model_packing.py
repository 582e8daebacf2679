"""Packed linear layers against stock ones, alone and in the families."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.fixtures.tiny_models import VOCABULARY, write_model
from workers.attention.cpu import CpuAttention
from workers.attention.transformers_hook import PagedPass
from workers.config import EngineConfig
from workers.model import weights
from workers.model.interface import SequenceSlice
from workers.model.kv_cache import PagedKvCache
from workers.model.loader import attention_spec
from workers.model.packing import PackedLinear, can_pack, pack_linears
from workers.model.rows import flatten
from workers.model.weights import LoadedModel, load_model, use_threads

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not can_pack(CPU, torch.bfloat16), reason="this CPU does not multiply bfloat16")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 2, 33, 300])
def test_a_packed_layer_computes_what_the_stock_one_does(rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(96, 160, bias=bias).bfloat16()
    given = torch.randn(1, rows, 96).bfloat16()
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(linear)(given), linear(given), atol=0.02, rtol=0.02)


def test_every_linear_inside_is_replaced_and_a_tied_embedding_stays() -> None:
    model = nn.Module()
    model.embed = nn.Embedding(32, 16, dtype=torch.bfloat16)
    model.head = nn.Linear(16, 32, bias=False, dtype=torch.bfloat16)
    model.head.weight = model.embed.weight
    model.layers = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.SiLU()).bfloat16()])
    with torch.inference_mode():
        hidden = model.embed(torch.tensor([[3, 1]]))
        before = model.head(model.layers[0](hidden))
        pack_linears(model)
        after = model.head(model.layers[0](hidden))
    assert not any(type(part) is nn.Linear for part in model.modules())
    assert torch.equal(model.embed(torch.tensor([[3, 1]])), hidden)
    torch.testing.assert_close(after, before, atol=0.02, rtol=0.02)


def logits_of(model: LoadedModel, tokens: Sequence[int], cut: int) -> Tensor:
    """`[tokens, VOCABULARY]` of a chunk up to `cut` and one after it, through our attention."""
    cache = PagedKvCache.allocate(model.geometry, 4, 16, CPU, model.dtype)
    attention = CpuAttention(attention_spec(model, 16))
    given = []
    for start, end in ((0, cut), (cut, len(tokens))):
        rows = flatten([SequenceSlice(tuple(tokens[start:end]), start, (2, 0, 3, 1), None)], 16, CPU)
        paged = PagedPass(attention.prepare(rows.batch), rows.batch.slots, cache)
        with torch.inference_mode():
            output = model.module(input_ids=rows.input_ids, position_ids=rows.positions, use_cache=False, paged=paged)
        given.append(output.logits[0])
    return torch.cat(given)


@pytest.mark.parametrize(
    ("name", "stock_left"),
    [
        ("llama-mha-tied", set()),
        ("qwen2", set()),
        ("qwen3", set()),
        ("mistral", set()),
        ("gemma2", set()),
        ("gemma3", set()),
        ("phi3", set()),
        ("gpt2", {"Conv1D"}),
        ("mixtral", {"MixtralExperts"}),
        ("qwen3-moe", {"Qwen3MoeExperts"}),
    ],
)
def test_a_packed_family_gives_the_logits_of_the_stock_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, stock_left: set[str]
) -> None:
    folder = write_model(name, tmp_path, dtype=torch.bfloat16)
    config = EngineConfig(str(folder), "tiny", dtype="bfloat16", threads=1)
    use_threads(1)
    packed = load_model(config)
    monkeypatch.setattr(weights, "can_pack", lambda device, dtype: False)
    stock = load_model(config)
    kinds = {type(part).__name__ for part in packed.module.modules()}
    assert "PackedLinear" in kinds
    assert "Linear" not in kinds
    assert stock_left <= kinds
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, VOCABULARY, (38,), generator=generator).tolist()
    got, wanted = logits_of(packed, tokens, 37), logits_of(stock, tokens, 37)
    torch.testing.assert_close(got, wanted, atol=0.15, rtol=0.05)
    assert float((got - wanted).abs().mean()) < 0.01


def test_float32_is_left_alone() -> None:
    assert not can_pack(CPU, torch.float32)
