"""Putting a worker's model together: threads, weights, attention, KV cache."""

from __future__ import annotations

import logging

import torch

from headrace.errors import InvalidRequest
from workers.attention.interface import AttentionSpec
from workers.attention.registry import resolve_attention
from workers.config import EngineConfig
from workers.model.runner import TorchRunner
from workers.model.weights import LoadedModel, load_model, use_threads

log = logging.getLogger(__name__)


def load_runner(config: EngineConfig) -> TorchRunner:
    """Raises UnknownModel, InvalidRequest (naming the setting) or OutOfMemory, each with one clear sentence."""
    use_threads(config.threads)
    model = load_model(config)
    attention = resolve_attention(_attention_name(config, model.device), attention_spec(model, config.block_size))
    log.info("attention %s on %s in %s", attention.name, model.device, model.dtype)
    runner = TorchRunner(config, model, attention)
    if config.row_invariant:
        runner.require_row_invariance()
    return runner


def attention_spec(model: LoadedModel, block_size: int) -> AttentionSpec:
    """What this model asks of an attention implementation."""
    geometry = model.geometry
    return AttentionSpec(
        device=model.device,
        dtype=model.dtype,
        num_heads=geometry.num_heads,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        block_size=block_size,
        windows=geometry.distinct_windows,
        softcap=geometry.softcap,
    )


def _attention_name(config: EngineConfig, device: torch.device) -> str:
    """Row-invariant mode has one attention. Raises InvalidRequest where another is asked for, or another device."""
    if not config.row_invariant:
        return config.attention
    if device.type != "cpu":
        raise InvalidRequest(
            f"row-invariant mode runs on the CPU only so far, not on {device.type}", field="row_invariant"
        )
    if config.attention not in ("auto", "invariant"):
        raise InvalidRequest(
            f"row-invariant mode needs attention 'invariant', not {config.attention!r}", field="attention"
        )
    return "invariant"
