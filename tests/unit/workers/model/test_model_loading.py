"""Everything that can be wrong with a model or a setting is one clear sentence."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Protocol

import pytest
import torch

from headrace.errors import HeadraceError, InvalidRequest, UnknownModel
from workers.config import EngineConfig
from workers.model import memory, weights
from workers.model.identity import weight_version
from workers.model.kv_cache import blocks_that_fit
from workers.model.loader import load_runner
from workers.model.memory import OutOfMemory


class MakeModel(Protocol):
    def __call__(self, model_type: str, poisoned_token: int | None = None, **changes: object) -> Path: ...


def load(folder: Path | str, **settings: object) -> None:
    defaults: dict[str, object] = {"dtype": "float32", "num_blocks": 4, "threads": 1}
    load_runner(EngineConfig(str(folder), "tiny", **(defaults | settings)))  # type: ignore[arg-type]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match=r"no model folder at .*nowhere"):
        load(tmp_path / "nowhere")


def test_a_folder_without_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match=r"not a model folder: it has no config\.json"):
        load(tmp_path)


def test_a_folder_with_pickled_weights_only(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    with pytest.raises(UnknownModel, match=r"no \*\.safetensors weights"):
        load(tmp_path)


@pytest.mark.parametrize("kind", ["warpdrive", None])
def test_an_unknown_model_type(make_model: MakeModel, kind: str | None) -> None:
    folder = make_model("llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": kind}))
    with pytest.raises(InvalidRequest, match=f"model type {kind!r} is not one transformers can load"):
        load(folder)


def test_a_configuration_that_is_not_json(make_model: MakeModel) -> None:
    folder = make_model("llama")
    (folder / "config.json").write_text("{")
    with pytest.raises(InvalidRequest) as raised:
        load(folder)
    assert raised.value.field == "model"


@pytest.mark.parametrize(
    ("model_type", "changes", "feature"),
    [
        ("gpt_oss", {"num_local_experts": 2, "num_experts_per_tok": 1}, "attention with sinks"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "attention to later tokens"),
        (
            "gemma3_text",
            {"attn_logit_softcapping": 30.0},
            r"soft-capped logits \(30.0\) that its layers do not pass on",
        ),
        ("llama4_text", {"num_local_experts": 2, "intermediate_size_mlp": 80}, "layers of type chunked_attention"),
        ("qwen3_next", {"num_experts": 2}, "layers of type linear_attention"),
        ("deepseek_v3", {"kv_lora_rank": 16, "q_lora_rank": 16}, "latent attention"),
        ("diffllama", {}, "attention twice in a layer"),
        ("doge", {}, "attention with a mask of the model's own"),
        ("nemotron", {"head_dim": None}, "attention without the arguments that its model was called with"),
        (
            "phi3",
            {
                "original_max_position_embeddings": 32,
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 4,
                    "long_factor": [2.0] * 4,
                    "original_max_position_embeddings": 32,
                },
            },
            "rotary positions of type 'longrope'.*max_context 32 avoids it",
        ),
    ],
)
def test_what_we_would_compute_wrongly_is_refused_by_name(
    make_model: MakeModel, model_type: str, changes: dict[str, object], feature: str
) -> None:
    folder = make_model(model_type, **changes)
    with pytest.raises(InvalidRequest, match=feature) as raised:
        load(folder)
    assert raised.value.field == "model"


@pytest.mark.parametrize("model_type", ["bloom", "mpt", "stablelm", "xglm"])
def test_a_family_outside_transformers_attention_interface_is_refused(make_model: MakeModel, model_type: str) -> None:
    with pytest.raises(InvalidRequest, match=f"model type '{model_type}' "):
        load(make_model(model_type))


def test_quantised_weights_are_refused_by_their_method(make_model: MakeModel) -> None:
    folder = make_model("llama")
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "gptq"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidRequest, match="model type 'llama' needs weights quantised by gptq"):
        load(folder)


def test_sinks_are_refused_also_where_nobody_knew_of_them(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.model.geometry.WITH_SINKS", ())
    with pytest.raises(InvalidRequest, match=r"needs attention with sinks \(s_aux\)"):
        load(make_model("gpt_oss", num_local_experts=2, num_experts_per_tok=1))


def test_position_biases_are_refused_before_any_weight_is_read(make_model: MakeModel) -> None:
    folder = make_model("llama")
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "falcon", "alibi": True}
    del config["head_dim"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidRequest, match="model type 'falcon' needs ALiBi position biases"):
        load(folder)


@pytest.mark.parametrize(("max_context", "windows"), [(None, (64,) * 3), (65, (64,) * 3), (64, (None,) * 3)])
def test_a_window_no_context_outgrows_is_no_window(
    make_model: MakeModel, max_context: int | None, windows: tuple[int | None, ...]
) -> None:
    folder = make_model("mistral", sliding_window=64)
    config = EngineConfig(str(folder), "tiny", dtype="float32", max_context=max_context, threads=1)
    assert weights.load_model(config).geometry.windows == windows


@pytest.mark.parametrize(
    ("settings", "field", "sentence"),
    [
        ({"dtype": "float8"}, "dtype", "known: auto, float32, bfloat16"),
        ({"max_context": 129}, "max_context", "from 1 to 128, the model's own, not 129"),
        ({"max_context": 0}, "max_context", "not 0"),
        ({"attention": "magic"}, "attention", "known: auto, flash, varlen, cpu, invariant, reference"),
    ],
)
def test_a_setting_out_of_bounds(make_model: MakeModel, settings: dict[str, object], field: str, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence) as raised:
        load(make_model("llama"), **settings)
    assert raised.value.field == field


def test_weights_that_do_not_fit_are_refused_with_the_numbers(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model("llama")
    monkeypatch.setattr(memory, "free_bytes", lambda _device: 1 << 10)
    with pytest.raises(OutOfMemory, match=r"the weights of tiny: 0\.\d+ GiB needed, 0\.\d+ GiB free"):
        load(folder)


def test_a_cache_that_does_not_fit_is_refused_with_the_numbers(make_model: MakeModel) -> None:
    with pytest.raises(OutOfMemory, match=r"a KV cache of 1000000000000 blocks: \d+\.\d\d GiB needed"):
        load(make_model("llama"), num_blocks=10**12)


def test_a_budget_below_one_block_is_refused(make_model: MakeModel) -> None:
    geometry = weights.load_model(EngineConfig(str(make_model("llama")), "tiny", dtype="float32")).geometry
    with pytest.raises(OutOfMemory, match="one block takes"):
        blocks_that_fit(100, geometry, 16, torch.float32)


def test_out_of_memory_survives_the_way_to_another_process() -> None:
    error = OutOfMemory("not enough")
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, HeadraceError)
    assert (type(copy), copy.message) == (OutOfMemory, "not enough")


def test_free_memory_is_known_here() -> None:
    free = memory.free_bytes(torch.device("cpu"))
    assert free is not None
    assert free > 1 << 20


def test_the_weight_version_follows_the_weights_and_nothing_else(make_model: MakeModel) -> None:
    one, same, other = make_model("llama"), make_model("llama"), make_model("llama", poisoned_token=3)
    assert weight_version(one) == weight_version(same)
    assert weight_version(one) != weight_version(other), "equal sizes and headers, other numbers"
    (same / "README.md").write_text("notes")
    assert weight_version(one) == weight_version(same)


@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [
        ({"eos_token_id": 2}, {}, (2,)),
        ({"eos_token_id": 2}, {"eos_token_id": [7, 2]}, (7, 2)),
        ({"text_config": {"eos_token_id": 5}}, {}, (5,)),
        ({"text_config": None}, {"eos_token_id": None}, ()),
    ],
)
def test_every_place_that_may_name_the_end_of_text_is_read(
    tmp_path: Path, config: dict[str, object], generation: dict[str, object], ids: tuple[int, ...]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert weights._eos_token_ids(tmp_path) == ids


def test_auto_is_a_dtype_the_processor_multiplies() -> None:
    wanted = torch.bfloat16 if weights.has_amx() or weights.has_bf16() else torch.float32
    assert weights.resolve_dtype("auto", torch.device("cpu")) is wanted
