"""The bridge from transformers' attention interface to ours.

transformers calls a registered function in every layer with that layer's query, key and value, and passes the model's
extra keyword arguments through. The pass's plan and caches travel as one such argument, `paged`. No mask function is
registered under the name, so transformers builds no mask (`masking_utils._preprocess_mask_arguments` returns early).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from workers.attention.interface import AttentionPass, write_kv

IMPLEMENTATION_NAME = "headrace_paged"


class KvCaches(Protocol):
    """Per layer, the caches `[num_blocks, block_size, kv_heads, head_dim]`."""

    @property
    def keys(self) -> Sequence[Tensor]: ...

    @property
    def values(self) -> Sequence[Tensor]: ...


@dataclass(frozen=True)
class PagedPass:
    """What every layer of one pass needs beside its own query, key and value."""

    attention: AttentionPass
    slots: Tensor
    caches: KvCaches


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    paged: PagedPass,
    **features: object,
) -> tuple[Tensor, None]:
    """Query, key and value are `[1, heads, rows, head_dim]`; returns `[1, rows, heads, head_dim]`.

    Raises NotImplementedError for features that change the result and that we do not compute; the loader refuses the
    models it knows to use them, this is the last line.
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if features.get(name) is not None:
            raise NotImplementedError(f"attention with {name} is not supported")
    layer: int = module.layer_idx  # type: ignore[assignment]
    keys, values = paged.caches.keys[layer], paged.caches.values[layer]
    write_kv(key[0].transpose(0, 1), value[0].transpose(0, 1), keys, values, paged.slots)
    out = paged.attention.attend(query[0].transpose(0, 1), keys, values, scale=scaling)
    return out[None], None


def register() -> None:
    """Makes `attn_implementation="headrace_paged"` known to transformers; safe to repeat."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION_NAME, paged_attention)
