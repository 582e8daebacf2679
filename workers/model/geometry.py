"""What a model's configuration says about its attention, and the refusal of what we would compute wrongly."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from headrace.errors import InvalidRequest

WITH_SINKS = ("gpt_oss",)
"""Model types whose attention has sinks. Their configurations do not say so; that others have them shows in the probe,
once their weights are loaded."""
BIASED = {"alibi": "ALiBi position biases", "relative_attention_num_buckets": "relative position biases"}
"""Attributes of configurations whose models add something to their scores."""


@dataclass(frozen=True)
class Geometry:
    """Shapes of one layer's attention, equal in all layers, and what each layer sees."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    """Tokens of prompt and output together, after `EngineConfig.max_context`."""
    windows: tuple[int | None, ...]
    """Per layer, how many tokens a row sees, itself included; None: the whole context."""
    softcap: float | None = None
    """Bound of attention scores, as in `AttentionPass.attend`."""

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * element_bytes

    def effective_window(self, window: int | None) -> int | None:
        """None for a window that no context outgrows: that is plain causal attention."""
        return window if window and window < self.max_context else None

    @property
    def distinct_windows(self) -> tuple[int | None, ...]:
        return tuple(dict.fromkeys(self.windows))


def read_geometry(config: Any, max_context: int | None) -> Geometry:
    """From a transformers configuration. Raises InvalidRequest, naming the feature, for models that need more than
    causal attention over a whole context.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise _unsupported(config, "an encoder")
    quantization = getattr(config, "quantization_config", None)
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise _unsupported(config, f"weights quantised by {method or 'a method it does not name'}")
    config = config.get_text_config(decoder=True)  # a model that also sees keeps it apart; others are their own
    _refuse_kinds(config)
    trained: int | None = getattr(config, "max_position_embeddings", None)
    if trained is None:
        raise InvalidRequest(f"{_kind(config)}: the configuration has no max_position_embeddings", field="model")
    if max_context is not None and not 1 <= max_context <= trained:
        raise InvalidRequest(
            f"max_context must be from 1 to {trained}, the model's own, not {max_context}", field="max_context"
        )
    context = max_context or trained
    _refuse_rope(config, context)
    heads = config.num_attention_heads
    geometry = Geometry(
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab_size=config.vocab_size,
        max_context=context,
        windows=(None,) * config.num_hidden_layers,
        softcap=getattr(config, "attn_logit_softcapping", None) or None,
    )
    return replace(geometry, windows=tuple(geometry.effective_window(window) for window in _windows(config)))


def _windows(config: Any) -> list[int | None]:
    """Per layer. Without a list of kinds, a configuration's window is every layer's."""
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    other = set(kinds) - {"full_attention", "sliding_attention"}
    if other:
        raise _unsupported(config, f"layers of type {', '.join(sorted(other))}")
    window = getattr(config, "sliding_window", None)
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _refuse_kinds(config: Any) -> None:
    if config.model_type in WITH_SINKS:
        raise _unsupported(config, "attention with sinks")
    if getattr(config, "is_heterogeneous", False):
        raise _unsupported(config, "layers that differ in shape")
    if getattr(config, "use_bidirectional_attention", None):
        raise _unsupported(config, "attention to later tokens")
    if getattr(config, "num_kv_shared_layers", 0):
        raise _unsupported(config, "keys and values shared between layers")
    if getattr(config, "kv_lora_rank", None):
        raise _unsupported(config, "latent attention (compressed keys and values)")
    for name, feature in BIASED.items():
        if getattr(config, name, None):
            raise _unsupported(config, feature)


def _refuse_rope(config: Any, context: int) -> None:
    """longrope's angles depend on the longest sequence of a batch once it outgrows the original context: one request
    would change its neighbours'. ("dynamic" does so beyond max_position_embeddings only, where no context reaches.)"""
    rope = getattr(config, "rope_parameters", None) or {}
    # Models with several kinds of layers have one set of parameters per kind.
    for parameters in (rope, *(nested for nested in rope.values() if isinstance(nested, dict))):
        short = parameters.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        if parameters.get("rope_type", "default") == "longrope" and not (short and context <= short):
            hint = f"; max_context {short} avoids it" if short else ""
            raise _unsupported(config, "rotary positions of type 'longrope', which depend on the batch", hint)


def _unsupported(config: Any, feature: str, hint: str = "") -> InvalidRequest:
    return InvalidRequest(f"{_kind(config)} needs {feature}, which is not supported yet{hint}", field="model")


def _kind(config: Any) -> str:
    return f"model type {getattr(config, 'model_type', 'unknown')!r}"
