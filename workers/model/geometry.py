"""What a model's configuration says about its attention, and the refusal of what we would compute wrongly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace.errors import InvalidRequest

PER_BATCH_ROPE = ("dynamic", "longrope")
"""Rotary variants whose angles depend on the longest sequence beside a row: one request would change its
neighbours'.
"""


@dataclass(frozen=True)
class Geometry:
    """Shapes of one layer's attention; equal in all layers."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    """Tokens of prompt and output together, after `EngineConfig.max_context`."""

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * element_bytes


def read_geometry(config: Any, max_context: int | None) -> Geometry:
    """From a transformers configuration. Raises InvalidRequest, naming the feature, for models that need more than
    causal attention over a whole context.
    """
    trained: int | None = getattr(config, "max_position_embeddings", None)
    if trained is None:
        raise InvalidRequest(f"{_kind(config)}: the configuration has no max_position_embeddings", field="model")
    if max_context is not None and not 1 <= max_context <= trained:
        raise InvalidRequest(
            f"max_context must be from 1 to {trained}, the model's own, not {max_context}", field="max_context"
        )
    context = max_context or trained
    _refuse_windows(config, context)
    _refuse_rope(config, context)
    if getattr(config, "attn_logit_softcapping", None):
        raise _unsupported(config, "soft-capped attention logits")
    if getattr(config, "is_encoder_decoder", False):
        raise _unsupported(config, "an encoder")
    if getattr(config, "num_kv_shared_layers", 0):
        raise _unsupported(config, "keys and values shared between layers")
    if getattr(config, "kv_lora_rank", None):
        raise _unsupported(config, "latent attention (compressed keys and values)")
    heads = config.num_attention_heads
    return Geometry(
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab_size=config.vocab_size,
        max_context=context,
    )


def _refuse_windows(config: Any, context: int) -> None:
    kinds = set(getattr(config, "layer_types", None) or ())
    other = kinds - {"full_attention", "sliding_attention"}
    if other:
        raise _unsupported(config, f"layers of type {', '.join(sorted(other))}")
    window = getattr(config, "sliding_window", None)
    # A window that no context outgrows is plain causal attention.
    if window and window < context and (not kinds or "sliding_attention" in kinds):
        raise _unsupported(
            config, f"sliding-window attention over {window} tokens", f"; max_context {window} avoids it"
        )


def _refuse_rope(config: Any, context: int) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    # Models with several kinds of layers have one set of parameters per kind.
    for parameters in (rope, *(nested for nested in rope.values() if isinstance(nested, dict))):
        kind = parameters.get("rope_type", "default")
        short = parameters.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        if kind in PER_BATCH_ROPE and not (short and context <= short):
            hint = f"; max_context {short} avoids it" if short else ""
            raise _unsupported(config, f"rotary positions of type {kind!r}, which depend on the batch", hint)


def _unsupported(config: Any, feature: str, hint: str = "") -> InvalidRequest:
    return InvalidRequest(f"{_kind(config)} needs {feature}, which is not supported yet{hint}", field="model")


def _kind(config: Any) -> str:
    return f"model type {getattr(config, 'model_type', 'unknown')!r}"
