"""Packed linear layers against stock ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from workers.model.packing import PackedLinear, can_pack, pack_linears

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


def test_float32_is_left_alone() -> None:
    assert not can_pack(CPU, torch.float32)
