"""The bridge from transformers' attention interface to ours.

transformers calls a registered function in every layer with that layer's query, key and value, and passes the model's
extra keyword arguments through. What computes a layer travels as one such argument, `paged`. No mask function is
registered under the name, so transformers builds no mask (`masking_utils._preprocess_mask_arguments` returns early).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from workers.attention.interface import AttentionPass, write_kv

IMPLEMENTATION_NAME = "headrace_paged"
UNSUPPORTED = {"s_aux": "sinks (s_aux)", "position_bias": "a position bias"}
"""Arguments of layers that change the result and that we do not compute."""


class KvCaches(Protocol):
    """Per layer, the caches `[num_blocks, block_size, kv_heads, head_dim]`."""

    @property
    def keys(self) -> Sequence[Tensor]: ...

    @property
    def values(self) -> Sequence[Tensor]: ...


class LayerAttention(Protocol):
    """Attention of one pass of a model, called once by each layer."""

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
        """`query` is `[rows, heads, head_dim]`, key and value `[rows, kv_heads, head_dim]`. Returns the query's
        shape."""
        ...


@dataclass(frozen=True)
class PagedPass:
    """Writes each layer's keys and values into the paged cache, then attends over it."""

    attention: AttentionPass
    slots: Tensor
    caches: KvCaches

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
        keys, values = self.caches.keys[layer], self.caches.values[layer]
        write_kv(key, value, keys, values, self.slots)
        return self.attention.attend(query, keys, values, scale=scale, window=window, softcap=softcap)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    paged: LayerAttention | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **features: object,
) -> tuple[Tensor, None]:
    """Query, key and value are `[1, heads, rows, head_dim]`; returns `[1, rows, heads, head_dim]`.

    Raises NotImplementedError for features that change the result and that we do not compute; a probe at loading
    turns it into a refusal (`workers.model.probe`).
    """
    if paged is None:
        raise NotImplementedError("attention without the arguments that its model was called with")
    for name in UNSUPPORTED:
        if features.get(name) is not None:
            raise NotImplementedError(f"attention with {UNSUPPORTED[name]}")
    if attention_mask is not None:
        raise NotImplementedError("attention with a mask of the model's own")
    layer: int = module.layer_idx  # type: ignore[assignment]
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    # transformers counts the row itself among a window's tokens, as we do; 0 and None both mean no window, no cap.
    out = paged.attend(layer, query, key, value, scale=scaling, window=sliding_window or None, softcap=softcap or None)
    return out[None], None


def register() -> None:
    """Makes `attn_implementation="headrace_paged"` known to transformers; safe to repeat."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION_NAME, paged_attention)
