"""GGUF names and layouts of the Llama and Qwen families, as Hugging Face names and layouts them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.errors import NoSuchModel
from cluster.model_cache.experts import MIXTRAL, QWEN3, Experts, experts_config
from cluster.model_cache.gguf_file import GgufFile
from cluster.model_cache.rotary import FACTORS, rope_parameters
from cluster.model_cache.safetensors_file import LazyTensor, write_safetensors


@dataclass(frozen=True)
class Architecture:
    """How one GGUF architecture is told to `transformers`."""

    hf_class: str
    model_type: str
    rotated_pairs: bool
    """GGUF stores Q and K rows of this one as interleaved rotary pairs; Hugging Face keeps the halves apart."""
    own_tensors: tuple[str, ...] = ()
    """Per layer, beside those that all have."""
    experts: Experts | None = None
    """Its layers have these in place of one gate, up and down."""


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama", True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", False, ("attn_q.bias", "attn_k.bias", "attn_v.bias")),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", False, ("attn_q_norm.weight", "attn_k_norm.weight")),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM", "qwen3_moe", False, ("attn_q_norm.weight", "attn_k_norm.weight"), QWEN3
    ),
}
MIXTURES = {"llama": Architecture("MixtralForCausalLM", "mixtral", True, experts=MIXTRAL)}
"""What an architecture of the same name is when it has experts."""


_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OPTIONAL = ("attn_q_norm", "attn_k_norm")
_DENSE = ("ffn_gate", "ffn_up", "ffn_down")


def architecture_of(source: GgufFile) -> Architecture:
    """Raises `NoSuchModel` naming the known ones for any other, and for variants whose numbers would come out wrong."""
    name = source.architecture
    if name not in ARCHITECTURES:
        raise NoSuchModel(
            f"{source.path} is a {name!r} model; GGUF files of {', '.join(ARCHITECTURES)} can be converted"
        )
    architecture = ARCHITECTURES[name]
    if source.get(f"{name}.expert_count", 0) and architecture.experts is None:
        if name not in MIXTURES:
            raise NoSuchModel(f"{source.path} is a mixture of experts of type {name!r}, which cannot be converted")
        architecture = MIXTURES[name]
    if source.get(f"{name}.attention.sliding_window", 0):
        raise NoSuchModel(f"{source.path} has a sliding window, which cannot be converted for {name!r}")
    return architecture


def require_complete(source: GgufFile) -> None:
    """Raises `NoSuchModel` naming a tensor that is missing, as in one part of a file that was split."""
    architecture = architecture_of(source)
    absent = (*_OPTIONAL, *_DENSE) if architecture.experts else _OPTIONAL
    in_layer = [f"{part}.weight" for part in _INNER if part not in absent] + list(architecture.own_tensors)
    if architecture.experts:
        in_layer += [f"{part}.weight" for part in (architecture.experts.router[0], *architecture.experts.parts)]
    layers = range(int(source.get(f"{source.architecture}.block_count")))
    wanted = ["token_embd.weight", "output_norm.weight", *(f"blk.{n}.{part}" for n in layers for part in in_layer)]
    missing = next((name for name in wanted if not source.has_tensor(name)), None)
    if missing is not None:
        raise NoSuchModel(f"{source.path} lacks the tensor {missing!r}; is it one part of several?")


def hf_name(name: str, experts: Experts | None = None) -> str | None:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`; None for a name that is not known."""
    stem, _, kind = name.rpartition(".")
    if stem in _OUTER:
        return f"{_OUTER[stem]}.{kind}"
    match stem.split("."):
        case ["blk", layer, part] if part in _INNER:
            return f"model.layers.{layer}.{_INNER[part]}.{kind}"
        case ["blk", layer, part] if experts is not None and part == experts.router[0]:
            return f"model.layers.{layer}.{experts.router[1]}.{kind}"
    return None


def split_pairs(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undoes llama.cpp's reordering of Q and K rows: within each head, (x0 y0 x1 y1 …) → (x0 x1 … y0 y1 …)."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def hf_config(source: GgufFile, vocab_size: int) -> dict[str, Any]:
    """The content of config.json, token ids aside."""
    architecture, key = architecture_of(source), source.architecture
    heads = int(source.get(f"{key}.attention.head_count"))
    hidden = int(source.get(f"{key}.embedding_length"))
    head_dim = int(source.get(f"{key}.attention.key_length", hidden // heads))
    rotary_dim = int(source.get(f"{key}.rope.dimension_count", head_dim))
    if rotary_dim != head_dim:
        raise NoSuchModel(
            f"{source.path} rotates {rotary_dim} of {head_dim} head dimensions, which cannot be converted"
        )
    rope = rope_parameters(source, head_dim)
    return {
        "architectures": [architecture.hf_class],
        "model_type": architecture.model_type,
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": int(source.get(f"{key}.feed_forward_length")),
        "num_hidden_layers": int(source.get(f"{key}.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(source.get(f"{key}.attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": int(source.get(f"{key}.context_length")),
        "rms_norm_eps": source.real(f"{key}.attention.layer_norm_rms_epsilon"),
        # transformers 5 reads `rope_parameters`, earlier releases and other engines `rope_theta`.
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
        "attention_bias": source.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": source.has_tensor("blk.0.ffn_up.bias"),
        "tie_word_embeddings": not source.has_tensor("output.weight"),
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    } | (experts_config(source, architecture.experts) if architecture.experts else {})


def write_weights(source: GgufFile, path: Path, on_written: Callable[[int, int], None]) -> None:
    """Writes every tensor of `source` to the safetensors file `path`. Raises `NoSuchModel` for an unknown one."""
    tensors = [tensor for name in source.tensor_names() for tensor in _lazy(source, name)]
    write_safetensors(path, sorted(tensors, key=lambda tensor: tensor.name), on_written)


def _lazy(source: GgufFile, name: str) -> list[LazyTensor]:
    if name == FACTORS:
        return []  # told by the configuration
    architecture, key = architecture_of(source), source.architecture
    if architecture.experts and (found := architecture.experts.tensors(source, name)):
        return found
    target = hf_name(name, architecture.experts)
    if target is None:
        raise NoSuchModel(f"{source.path} has a tensor {name!r} that its architecture does not explain")
    heads = int(source.get(f"{key}.attention.head_count"))
    part = name.split(".")[-2]
    if part == "attn_k":
        heads = int(source.get(f"{key}.attention.head_count_kv", heads))

    def load() -> NDArray[np.float32]:
        values = source.tensor(name)
        return split_pairs(values, heads) if architecture.rotated_pairs and part in ("attn_q", "attn_k") else values

    return [LazyTensor(target, source.tensor_shape(name), load)]
