"""What layers ask of attention, against what the configuration says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headrace.errors import InvalidRequest
from workers.attention.transformers_hook import paged_attention
from workers.model.geometry import Geometry
from workers.model.probe import measured

CPU = torch.device("cpu")
SAID = Geometry(2, 4, 4, 8, 97, max_context=64, windows=(16, None))
"""Two layers, the first with a window of 16 tokens."""


@dataclass(frozen=True)
class Asks:
    """What a layer hands to attention."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    value_dim: int = 8
    layer: int | None = None
    features: tuple[tuple[str, Any], ...] = ()


class Layers(nn.Module):
    """A model that only attends, as transformers' layers do."""

    def __init__(self, *layers: Asks) -> None:
        super().__init__()
        self.config = SimpleNamespace(model_type="made-up")
        self._asks = layers

    def forward(self, input_ids: Tensor, position_ids: Tensor, **passed: Any) -> None:
        rows = input_ids.shape[1]
        for number, asks in enumerate(self._asks):
            layer = nn.Module()
            layer.layer_idx = number if asks.layer is None else asks.layer  # type: ignore[assignment]
            out, _ = paged_attention(
                layer,
                torch.ones(1, asks.heads, rows, asks.head_dim),
                torch.ones(1, asks.kv_heads, rows, asks.head_dim),
                torch.ones(1, asks.kv_heads, rows, asks.value_dim),
                None,
                scaling=1.0,
                paged=passed["paged"],
                **dict(asks.features),
            )
            assert out.shape == (1, rows, asks.heads, asks.value_dim)


WINDOWED = Asks(features=(("sliding_window", 16),))


def test_heads_are_the_models_own() -> None:
    """The configuration here said four key heads; the layers have two."""
    assert measured(SAID, Layers(WINDOWED, Asks()), CPU) == replace(SAID, num_kv_heads=2)


@pytest.mark.parametrize("none", [0, None])
def test_no_window_and_no_cap_may_be_told_by_zero(none: int | None) -> None:
    layers = Layers(WINDOWED, Asks(features=(("sliding_window", none), ("softcap", none))))
    assert measured(SAID, layers, CPU).windows == (16, None)


def test_a_window_beyond_the_context_is_none() -> None:
    layers = Layers(WINDOWED, Asks(features=(("sliding_window", 64),)))
    assert measured(SAID, layers, CPU).windows == (16, None)


@pytest.mark.parametrize(
    ("layers", "sentence"),
    [
        ((Asks(), Asks()), r"windows of \(16, None\) tokens, while its layers pass on \(None, None\)"),
        ((WINDOWED, WINDOWED), r"its layers pass on \(16, 16\)"),
        ((WINDOWED,), "attention in 1 of 2 layers"),
        ((WINDOWED, Asks(), Asks()), "attention in 3 of 2 layers"),
        ((WINDOWED, Asks(), Asks(layer=1)), "attention twice in a layer"),
        ((WINDOWED, Asks(heads=8)), "layers whose heads differ"),
        ((WINDOWED, Asks(kv_heads=1)), "layers whose heads differ"),
        ((WINDOWED, Asks(head_dim=16, value_dim=16)), "layers whose heads differ"),
        ((WINDOWED, Asks(value_dim=4)), "values of 4 dimensions beside keys of 8"),
        ((WINDOWED, Asks(features=(("softcap", 50.0),))), r"soft-capped logits \(None\).*\(50.0\)"),
        ((WINDOWED, Asks(features=(("s_aux", torch.ones(4)),))), r"attention with sinks \(s_aux\)"),
        ((WINDOWED, Asks(features=(("position_bias", torch.ones(4)),))), "attention with a position bias"),
    ],
)
def test_what_one_cache_or_our_kernels_cannot_do_is_refused_by_name(layers: tuple[Asks, ...], sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=f"model type 'made-up' needs .*{sentence}") as raised:
        measured(SAID, Layers(*layers), CPU)
    assert raised.value.field == "model"


def test_a_model_that_fails_on_its_first_token_is_one_sentence() -> None:
    class Broken(Layers):
        def forward(self, input_ids: Tensor, position_ids: Tensor, **passed: Any) -> None:
            raise IndexError("no such expert\nat some place")

    with pytest.raises(InvalidRequest, match=r"^model type 'made-up' cannot run: no such expert$"):
        measured(SAID, Broken(), CPU)
