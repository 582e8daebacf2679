"""A model that went through a GGUF file, converted once and served, against transformers on the folder it came from.

The weights are such that bfloat16, the converter's format, holds them exactly; so the logits must be the same to
float32 rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file

from cluster.errors import NoSuchModel
from cluster.model_cache import resolve_model
from cluster.model_cache.rotary import llama3_divisors
from tests.fixtures import tiny_models
from tests.fixtures.tiny_gguf import write_gguf
from tests.fixtures.tiny_models import FAMILIES, TinyFamily, write_model
from workers.attention.cpu import CpuAttention
from workers.attention.transformers_hook import PagedPass
from workers.config import EngineConfig
from workers.model.interface import SequenceSlice
from workers.model.kv_cache import PagedKvCache
from workers.model.loader import attention_spec
from workers.model.rows import flatten
from workers.model.weights import load_model, use_threads

TOLERANCE = 2e-4
TOKENS = tuple((37 * i + 5) % 97 for i in range(57))
LLAMA31 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def our_logits(folder: Path) -> torch.Tensor:
    use_threads(1)
    model = load_model(EngineConfig(str(folder), "tiny", dtype="float32", threads=1))
    cache = PagedKvCache.allocate(model.geometry, 4, 16, model.device, model.dtype)
    rows = flatten([SequenceSlice(TOKENS, 0, (0, 1, 2, 3), None)], 16, model.device)
    paged = PagedPass(CpuAttention(attention_spec(model, 16)).prepare(rows.batch), rows.batch.slots, cache)
    with torch.inference_mode():
        output = model.module(input_ids=rows.input_ids, position_ids=rows.positions, use_cache=False, paged=paged)
    logits: torch.Tensor = output.logits[0]
    return logits


def stock_logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([TOKENS])).logits[0]
    return logits


def source(tmp_path: Path, name: str) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    return write_model(name, folder, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "name", ["llama", "llama-mha-tied", "llama-rope-linear", "llama-rope-yarn", "qwen2", "qwen3", "mixtral"]
)
def test_a_converted_model_computes_what_its_source_does(tmp_path: Path, name: str) -> None:
    folder = source(tmp_path, name)
    gguf = write_gguf(folder, tmp_path / "tiny.gguf")
    converted = resolve_model(str(gguf), tmp_path / "cache").path
    torch.testing.assert_close(our_logits(converted), stock_logits(folder), atol=TOLERANCE, rtol=0.0)


@pytest.fixture
def with_family(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, TinyFamily], None]:
    return lambda name, family: monkeypatch.setitem(tiny_models.FAMILIES, name, family)


def test_a_mixture_of_experts(tmp_path: Path, with_family: Callable[[str, TinyFamily], None]) -> None:
    """GGUF has no word for layers without experts among those that have them."""
    changes = FAMILIES["qwen3-moe"].changes | {"mlp_only_layers": []}
    with_family("qwen3-moe-all", replace(FAMILIES["qwen3-moe"], changes=changes))
    folder = source(tmp_path, "qwen3-moe-all")
    gguf = write_gguf(folder, tmp_path / "tiny.gguf")
    converted = resolve_model(str(gguf), tmp_path / "cache").path
    torch.testing.assert_close(our_logits(converted), stock_logits(folder), atol=TOLERANCE, rtol=0.0)


def test_llama_31_frequencies(tmp_path: Path, with_family: Callable[[str, TinyFamily], None]) -> None:
    """The file has one divisor per frequency; the configuration gets back the parameters they came from."""
    with_family("llama-3.1", TinyFamily("llama", {"rope_parameters": LLAMA31}))
    folder = source(tmp_path, "llama-3.1")
    extra = {"rope_freqs.weight": _divisors_of(folder)}
    converted = resolve_model(str(write_gguf(folder, tmp_path / "a.gguf", extra=extra)), tmp_path / "cache").path
    assert _config(converted)["rope_parameters"] == LLAMA31
    torch.testing.assert_close(our_logits(converted), stock_logits(folder), atol=TOLERANCE, rtol=0.0)


def _divisors_of(folder: Path) -> np.ndarray:
    """Plain frequencies over those of the model, by transformers' own arithmetic."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    plain = 1.0 / 1e4 ** (torch.arange(0, 16, 2) / 16)
    divisors = (plain / model.model.rotary_emb.inv_freq).numpy()
    np.testing.assert_allclose(divisors, llama3_divisors(1e4, 16, 8.0), rtol=1e-5)
    assert divisors.max() == pytest.approx(8.0)
    return divisors.astype(np.float32)


def _config(folder: Path) -> dict[str, Any]:
    import json

    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("divisors", [[1.0, 1, 1, 1, 2, 3, 4, 8], [1.0, 8.0]])
def test_frequencies_of_another_kind_are_refused(tmp_path: Path, divisors: list[float]) -> None:
    extra = {"rope_freqs.weight": np.array(divisors, dtype=np.float32)}
    gguf = write_gguf(source(tmp_path, "llama"), tmp_path / "odd.gguf", extra=extra)
    with pytest.raises(NoSuchModel, match=r"odd\.gguf has rotary divisors that are not Llama 3's"):
        resolve_model(str(gguf), tmp_path / "cache")


def test_quantized_tensors_are_what_their_bits_say(
    tmp_path: Path, with_family: Callable[[str, TinyFamily], None]
) -> None:
    changes = FAMILIES["qwen3-moe"].changes | {"mlp_only_layers": []}
    with_family("qwen3-moe-all", replace(FAMILIES["qwen3-moe"], changes=changes))
    folder = source(tmp_path, "qwen3-moe-all")
    gguf = write_gguf(folder, tmp_path / "tiny.gguf", quantized=("attn_output", "ffn_down_exps"))
    converted = load_file(resolve_model(str(gguf), tmp_path / "cache").path / "model.safetensors")
    original = load_file(folder / "model.safetensors")
    assert converted.keys() == original.keys()
    changed = 0
    for name, tensor in original.items():
        wanted = tensor
        if "o_proj" in name or ("experts" in name and "down_proj" in name):
            bits = quantize(tensor.float().numpy(), GGMLQuantizationType.Q8_0)
            wanted = torch.from_numpy(dequantize(bits, GGMLQuantizationType.Q8_0)).bfloat16()
            changed += not torch.equal(wanted, tensor)
        assert torch.equal(converted[name], wanted), name
    assert changed == 3 + 3 * 4
