"""Tiny models with random weights, written as Hugging Face folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

VOCABULARY = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "eos_token_id": [2, 96],
    "bos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
}

MakeModel = Callable[..., Path]


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """`make_model("llama", **changes_to_the_configuration)` → a folder; the same weights for the same arguments."""
    from transformers import AutoConfig, AutoModelForCausalLM

    def make(model_type: str, poisoned_token: int | None = None, **changes: Any) -> Path:
        folder = tmp_path_factory.mktemp(model_type)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(SIZES | changes)))
        if poisoned_token is not None:
            model.get_input_embeddings().weight.data[poisoned_token] = torch.nan
        model.save_pretrained(folder)
        return folder

    return make
