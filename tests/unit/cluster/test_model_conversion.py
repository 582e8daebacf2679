"""A GGUF file becomes the Hugging Face folder it was made from, once, whatever happens meanwhile."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from safetensors import safe_open
from tokenizers import Tokenizer

from cluster.errors import NoSuchModel
from cluster.model_cache import resolve_model
from cluster.model_cache.convert import convert_gguf
from cluster.model_cache.folders import MANIFEST, is_intact, make_once
from cluster.model_cache.llama_weights import split_pairs
from cluster.model_cache.safetensors_file import to_bfloat16

LAYERS, HIDDEN, HEADS, KV_HEADS, FFN = 2, 32, 4, 2, 48
HEAD_DIM = HIDDEN // HEADS
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


TOKENS = [*SPECIAL, *byte_alphabet(), "Ġt", "he", "Ġthe", "12"]
MERGES = ["Ġ t", "h e", "Ġt he", "1 2"]


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to Q and K, written as a loop."""
    result = np.empty_like(rows)
    size = rows.shape[0] // heads
    for head in range(heads):
        for i in range(size // 2):
            result[head * size + 2 * i] = rows[head * size + i]
            result[head * size + 2 * i + 1] = rows[head * size + size // 2 + i]
    return result


def weights(architecture: str = "llama") -> dict[str, np.ndarray]:
    """Hugging Face's names and layout; values that bfloat16 holds exactly."""
    random = np.random.default_rng(7)

    def matrix(*shape: int) -> np.ndarray:
        return (random.integers(-64, 64, shape) / 32).astype(np.float32)

    made = {"model.embed_tokens.weight": matrix(len(TOKENS), HIDDEN), "model.norm.weight": matrix(HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        made |= {
            prefix + "input_layernorm.weight": matrix(HIDDEN),
            prefix + "post_attention_layernorm.weight": matrix(HIDDEN),
            prefix + "self_attn.q_proj.weight": matrix(HIDDEN, HIDDEN),
            prefix + "self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.o_proj.weight": matrix(HIDDEN, HIDDEN),
            prefix + "mlp.gate_proj.weight": matrix(FFN, HIDDEN),
            prefix + "mlp.up_proj.weight": matrix(FFN, HIDDEN),
            prefix + "mlp.down_proj.weight": matrix(HIDDEN, FFN),
        }
        if architecture == "qwen2":
            for part, rows in (("q", HIDDEN), ("k", KV_HEADS * HEAD_DIM), ("v", KV_HEADS * HEAD_DIM)):
                made[f"{prefix}self_attn.{part}_proj.bias"] = matrix(rows)
        if architecture == "qwen3":
            made |= {f"{prefix}self_attn.{part}_norm.weight": matrix(HEAD_DIM) for part in "qk"}
    return made


GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    if name.startswith("model.layers."):
        _, _, layer, rest = name.split(".", 3)
        part, _, kind = rest.rpartition(".")
        return f"blk.{layer}.{GGUF_NAMES[part]}.{kind}"
    return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]


def write_gguf(
    path: Path, *, architecture: str = "llama", pre: str = "smollm", drop: str = "", extra: str = "", kind: str = "gpt2"
) -> Path:
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(50_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    for name, values in weights(architecture).items():
        stored = values
        if architecture == "llama" and name.endswith("q_proj.weight"):
            stored = interleave(values, HEADS)
        if architecture == "llama" and name.endswith("k_proj.weight"):
            stored = interleave(values, KV_HEADS)
        if gguf_name(name) != drop:
            writer.add_tensor(gguf_name(name), stored)
    if extra:
        writer.add_tensor(extra, np.ones(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf")


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_weights_come_back_as_they_were(tmp_path: Path, architecture: str) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    convert_gguf(write_gguf(tmp_path / "tiny.gguf", architecture=architecture), folder)
    expected = weights(architecture)
    with safe_open(folder / "model.safetensors", framework="pt") as stored:
        names = list(stored.keys())
        assert set(names) == set(expected)
        for name in names:
            tensor = stored.get_tensor(name)
            assert str(tensor.dtype) == "torch.bfloat16"
            np.testing.assert_array_equal(tensor.float().numpy(), expected[name], err_msg=name)


def test_config_says_what_the_metadata_say(gguf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    convert_gguf(gguf, folder)
    config = json.loads((folder / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": len(TOKENS),
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-05,
        "rope_theta": 50_000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    assert {name: config[name] for name in expected} == expected
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2
    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    assert template.startswith("{% for m in messages %}")


def test_the_tokenizer_merges_splits_digits_and_keeps_special_tokens_whole(gguf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    convert_gguf(gguf, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = {token: i for i, token in enumerate(TOKENS)}
    assert tokenizer.encode(" the").ids == [ids["Ġthe"]]
    assert tokenizer.encode("12").ids == [ids["1"], ids["2"]]  # single digits, although a merge exists
    assert tokenizer.encode("<|im_end|>").ids == [2]
    assert tokenizer.encode("").ids == []
    for text in ("😀 日本語", "a\tb\n\n", "é"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_without_the_digit_rule_the_merge_applies(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    convert_gguf(write_gguf(tmp_path / "t.gguf", pre="gpt-2"), folder)
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).encode("12").ids == [TOKENS.index("12")]


def test_split_pairs_undoes_the_interleaving() -> None:
    rows = np.arange(24, dtype=np.float32).reshape(12, 2)
    np.testing.assert_array_equal(split_pairs(interleave(rows, 2), 2), rows)


def test_bfloat16_rounds_to_nearest_even_and_keeps_the_unusual() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -0.0, np.inf, -np.inf, np.nan, 3.4e38], dtype=np.float32)
    bits = to_bfloat16(values)
    back = (bits.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(back[:6], np.array([1.0, 1.0, 1.015625, -0.0, np.inf, -np.inf], dtype=np.float32))
    assert np.isnan(back[6])
    assert np.isposinf(back[7])  # above the largest bfloat16


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"architecture": "mamba"}, "'mamba' model"),
        ({"pre": "martian"}, "'martian'"),
        ({"kind": "t5"}, "'t5' tokenizer"),
        ({"extra": "blk.0.secret.weight"}, "blk.0.secret.weight"),
        ({"drop": "token_embd.weight"}, "token_embd.weight"),
        ({"drop": "blk.1.ffn_up.weight"}, "blk.1.ffn_up.weight"),
    ],
)
def test_what_cannot_be_converted_faithfully_is_refused_by_name(
    tmp_path: Path, change: dict[str, str], told: str
) -> None:
    path = write_gguf(tmp_path / "odd.gguf", **change)  # type: ignore[arg-type]
    with pytest.raises(NoSuchModel, match=told):
        resolve_model(str(path), tmp_path / "cache")
    assert list((tmp_path / "cache" / "models").glob("odd*")) == []


def test_a_file_that_is_no_gguf_is_told_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"hello" * 100)
    with pytest.raises(NoSuchModel, match=r"bad\.gguf is not a readable GGUF file"):
        resolve_model(str(path), tmp_path / "cache")


def test_a_truncated_file_is_told_in_one_line(gguf: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(gguf.read_bytes()[:-5_000])
    with pytest.raises(NoSuchModel, match=r"cut\.gguf"):
        resolve_model(str(cut), tmp_path / "cache")


def test_a_gguf_is_converted_once_and_again_when_it_changes(gguf: Path, tmp_path: Path) -> None:
    cache, stages = tmp_path / "cache", []

    def note(stage: str, done_bytes: int, total_bytes: int) -> None:
        stages.append(stage)

    first = resolve_model(str(gguf), cache, note)
    assert first.name == "tiny"
    assert stages
    stages.clear()
    assert resolve_model(str(gguf), cache, note) == first
    assert stages == []
    write_gguf(gguf, pre="gpt-2")
    assert resolve_model(str(gguf), cache, note) == first
    assert stages
    assert Tokenizer.from_file(str(first.path / "tokenizer.json")).encode("12").ids == [TOKENS.index("12")]


def test_a_damaged_folder_is_made_anew_and_a_touched_one_is_not(gguf: Path, tmp_path: Path) -> None:
    folder = resolve_model(str(gguf), tmp_path / "cache").path
    recipe = json.loads((folder / MANIFEST).read_text())["recipe"]
    config = folder / "config.json"
    config.write_bytes(config.read_bytes())  # another modification time, the same content
    assert is_intact(folder, recipe)
    text = config.read_text()
    config.write_text(text.replace("LlamaForCausalLM", "LlamaForCausalLN"))  # the same size
    assert not is_intact(folder, recipe)
    assert resolve_model(str(gguf), tmp_path / "cache").path == folder
    assert config.read_text() == text


def test_a_failure_half_way_leaves_nothing_behind(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        (folder / "part").write_text("half")
        raise NoSuchModel("gone")

    with pytest.raises(NoSuchModel):
        make_once(tmp_path / "model", "recipe", fill)
    assert [p.name for p in tmp_path.iterdir() if not p.name.endswith(".lock")] == []


def test_two_at_once_make_it_once(tmp_path: Path) -> None:
    made = []
    filling, go_on = threading.Event(), threading.Event()

    def fill(folder: Path) -> None:
        filling.set()
        assert go_on.wait(10)
        made.append(folder)
        (folder / "file").write_text("x")

    threads = [threading.Thread(target=make_once, args=(tmp_path / "m", "recipe", fill)) for _ in range(2)]
    threads[0].start()
    assert filling.wait(10)
    threads[1].start()  # waits for the lock, then finds the folder
    go_on.set()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert len(made) == 1
    assert (tmp_path / "m" / "file").read_text() == "x"


def test_a_model_folder_is_taken_as_it_is_if_complete(gguf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    with pytest.raises(NoSuchModel, match=r"lacks config\.json, tokenizer\.json, \*\.safetensors"):
        resolve_model(str(folder), tmp_path / "cache")
    convert_gguf(gguf, folder)
    found = resolve_model(str(folder), tmp_path / "cache")
    assert (found.path, found.name) == (folder.resolve(), "my-model")


def test_a_hub_id_brings_one_copy_of_the_weights(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.utils import filter_repo_objects

    offered = [
        "config.json",
        "tokenizer.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "consolidated.safetensors",
        "original/model.safetensors",
        "onnx/config.json",
        "pytorch_model.bin",
        "modeling_own.py",
    ]
    taken: list[str] = []

    def download(hub_id: str, *, allow_patterns: list[str], ignore_patterns: list[str], etag_timeout: float) -> str:
        taken.extend(filter_repo_objects(offered, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))
        convert_gguf(gguf, tmp_path)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_model("owner/tiny", tmp_path / "cache").name == "tiny"
    assert taken == offered[:4]


def test_a_folder_whose_weights_are_cut_short_is_told_before_anything_starts(gguf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    convert_gguf(gguf, folder)
    weights_file = folder / "model.safetensors"
    weights_file.write_bytes(weights_file.read_bytes()[:-1])
    with pytest.raises(NoSuchModel, match=r"model\.safetensors is cut short"):
        resolve_model(str(folder), tmp_path / "cache")


@pytest.mark.parametrize(
    "spec", ["nonsense", "./nowhere", "/nowhere/at/all", "a/b/c", "missing.gguf", "~/nowhere-at-all"]
)
def test_what_names_no_model_is_told_in_one_line(spec: str, tmp_path: Path) -> None:
    with pytest.raises(NoSuchModel) as caught:
        resolve_model(spec, tmp_path / "cache")
    assert "\n" not in str(caught.value)
