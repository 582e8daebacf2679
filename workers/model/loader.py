"""Putting a worker's model together: threads, weights, attention, KV cache."""

from __future__ import annotations

import logging

from workers.attention.interface import AttentionSpec
from workers.attention.registry import resolve_attention
from workers.config import EngineConfig
from workers.model.runner import TorchRunner
from workers.model.weights import load_model, use_threads

log = logging.getLogger(__name__)


def load_runner(config: EngineConfig) -> TorchRunner:
    """Raises UnknownModel, InvalidRequest (naming the setting) or OutOfMemory, each with one clear sentence."""
    use_threads(config.threads)
    model = load_model(config)
    geometry = model.geometry
    spec = AttentionSpec(
        model.device, model.dtype, geometry.num_heads, geometry.num_kv_heads, geometry.head_dim, config.block_size
    )
    attention = resolve_attention(config.attention, spec)
    log.info("attention %s on %s in %s", attention.name, model.device, model.dtype)
    return TorchRunner(config, model, attention)
