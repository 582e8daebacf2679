"""Mixtures of experts: GGUF keeps one tensor for all experts of a layer, Hugging Face's folders one for each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from cluster.model_cache.gguf_file import GgufFile
from cluster.model_cache.safetensors_file import LazyTensor


@dataclass(frozen=True)
class Experts:
    """Where one family keeps a layer's router and experts."""

    place: str
    gate: str
    up: str
    down: str

    @property
    def router(self) -> tuple[str, str]:
        """GGUF's name and Hugging Face's."""
        return "ffn_gate_inp", f"{self.place}.gate"

    @property
    def parts(self) -> dict[str, str]:
        return {"ffn_gate_exps": self.gate, "ffn_up_exps": self.up, "ffn_down_exps": self.down}

    def tensors(self, source: GgufFile, name: str) -> list[LazyTensor]:
        """Those that the tensor `name` (`blk.3.ffn_up_exps.weight`, `[experts, …]`) holds; none if it is another."""
        match name.split("."):
            case ["blk", layer, part, "weight"] if part in self.parts:
                prefix = f"model.layers.{layer}.{self.place}.experts"
                count, *shape = source.tensor_shape(name)
                return [
                    LazyTensor(
                        f"{prefix}.{i}.{self.parts[part]}.weight", tuple(shape), partial(source.tensor, name, part=i)
                    )
                    for i in range(count)
                ]
        return []


QWEN3 = Experts("mlp", "gate_proj", "up_proj", "down_proj")
MIXTRAL = Experts("block_sparse_moe", "w1", "w3", "w2")


def experts_config(source: GgufFile, experts: Experts) -> dict[str, Any]:
    """What config.json says of them. GGUF has no word for how the chosen weights are normalised or for layers without
    experts: llama.cpp computes these architectures in one way, which is said here."""
    key = source.architecture
    count, chosen = int(source.get(f"{key}.expert_count")), int(source.get(f"{key}.expert_used_count"))
    if experts is MIXTRAL:
        return {"num_local_experts": count, "num_experts_per_tok": chosen, "sliding_window": None}
    return {
        "num_experts": count,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": int(source.get(f"{key}.expert_feed_forward_length")),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
