"""What a loaded model really asks of attention, found by running one token through it.

A configuration tells only what a family's code chooses to read from it: whether a window reaches the attention call,
how many key heads there are, which layers attend at all. transformers' own kernels get windows through masks, so a
model that forgets to pass its window on would be computed wrongly here, and silently. One row costs less than warming
up does, and makes the difference an error with a name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from headrace.errors import InvalidRequest
from workers.model.geometry import Geometry


@dataclass(frozen=True)
class LayerShape:
    """What one layer handed to attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None
    softcap: float | None


class Probe:
    """Stands where the paged cache will be; notes each layer's call and answers zeros."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerShape] = {}
        self.repeated = False

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        self.repeated |= layer in self.layers
        self.layers[layer] = LayerShape(query.shape[1], key.shape[1], key.shape[2], value.shape[2], window, softcap)
        return query.new_zeros(*query.shape[:2], value.shape[2])


def probe_model(module: nn.Module, device: torch.device) -> Probe:
    """Raises InvalidRequest when the model's attention needs something that we do not compute."""
    probe = Probe()
    zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
    try:
        with torch.inference_mode():
            module(input_ids=zero, position_ids=zero, use_cache=False, logits_to_keep=1, paged=probe)
    except NotImplementedError as error:
        raise _unsupported(module, str(error)) from error
    except Exception as error:  # a model's code may raise anything; it says so in one sentence, before it serves
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InvalidRequest(f"model type {_kind(module)!r} cannot run: {why}", field="model") from error
    return probe


def measured(geometry: Geometry, module: nn.Module, device: torch.device) -> Geometry:
    """`geometry` with the heads that the model really has. Raises InvalidRequest, naming the difference, when layers
    differ in ways that one cache cannot hold, or when the model asks for another attention than its configuration
    announces."""
    probe = probe_model(module, device)
    if probe.repeated:
        raise _unsupported(module, "attention twice in a layer")
    if sorted(probe.layers) != list(range(geometry.num_layers)):
        raise _unsupported(module, f"attention in {len(probe.layers)} of {geometry.num_layers} layers")
    layers = [probe.layers[i] for i in range(geometry.num_layers)]
    first = layers[0]
    for layer in layers:
        if layer.head_dim != layer.value_dim:
            raise _unsupported(module, f"values of {layer.value_dim} dimensions beside keys of {layer.head_dim}")
        if (layer.num_heads, layer.num_kv_heads, layer.head_dim) != (
            first.num_heads,
            first.num_kv_heads,
            first.head_dim,
        ):
            raise _unsupported(
                module, "layers whose heads differ in number or size, for which one KV cache has no room"
            )
        if layer.softcap != geometry.softcap:
            raise _unsupported(
                module, f"soft-capped logits ({geometry.softcap}) that its layers do not pass on ({layer.softcap})"
            )
    windows = tuple(geometry.effective_window(layer.window) for layer in layers)
    if windows != geometry.windows:
        raise _unsupported(module, f"windows of {geometry.windows} tokens, while its layers pass on {windows}")
    return replace(geometry, num_heads=first.num_heads, num_kv_heads=first.num_kv_heads, head_dim=first.head_dim)


def _unsupported(module: nn.Module, feature: str) -> InvalidRequest:
    return InvalidRequest(f"model type {_kind(module)!r} needs {feature}, which is not supported yet", field="model")


def _kind(module: nn.Module) -> str:
    config: Any = getattr(module, "config", None)
    return getattr(config, "model_type", "unknown")
