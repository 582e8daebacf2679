"""A GGUF file's rotary frequencies as transformers' `rope_parameters`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.errors import NoSuchModel
from cluster.model_cache.gguf_file import GgufFile

FACTORS = "rope_freqs.weight"
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What every published model of this kind has. A file holds only what came out of it: one divisor per frequency."""


def rope_parameters(source: GgufFile, head_dim: int) -> dict[str, Any]:
    """Raises `NoSuchModel` for a scaling that cannot be told exactly."""
    key = source.architecture
    theta = source.real(f"{key}.rope.freq_base", 10_000.0)
    kind = source.get(f"{key}.rope.scaling.type", "none")
    if source.has_tensor(FACTORS):
        if kind != "none":
            raise NoSuchModel(f"{source.path} scales its rotary frequencies twice, by {kind!r} and by {FACTORS}")
        return _llama3(source, theta, head_dim)
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    parameters = {"rope_type": kind, "rope_theta": theta, "factor": source.real(f"{key}.rope.scaling.factor")}
    if kind == "linear":
        return parameters
    if kind == "yarn":
        original = int(source.get(f"{key}.rope.scaling.original_context_length"))
        return parameters | {"original_max_position_embeddings": original}
    raise NoSuchModel(f"{source.path} scales its rotary frequencies by {kind!r}; linear and yarn can be converted")


def _llama3(source: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    divisors = source.tensor(FACTORS).astype(np.float64)
    factor = float(np.round(divisors.max(), 4))
    if divisors.shape != (head_dim // 2,) or not np.allclose(
        divisors, llama3_divisors(theta, head_dim, factor), rtol=1e-4
    ):
        raise NoSuchModel(f"{source.path} has rotary divisors that are not Llama 3's, which cannot be converted")
    return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **LLAMA3}


def llama3_divisors(theta: float, head_dim: int, factor: float) -> NDArray[np.float64]:
    """By how much Llama 3.1 divides each of its `head_dim / 2` frequencies: long waves by `factor`, short ones not at
    all, those between by a blend (as in transformers' `llama3` rotary type)."""
    waves = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    original, low, high = (
        LLAMA3[name] for name in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    blend = np.clip((original / waves - low) / (high - low), 0.0, 1.0)
    divisors: NDArray[np.float64] = 1.0 / ((1.0 - blend) / factor + blend)
    return divisors
