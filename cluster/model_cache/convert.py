"""One GGUF file → one Hugging Face folder: bf16 safetensors, config, tokenizer, chat template.

`transformers` can do this too but takes over a minute for the embedded model; dequantising with NumPy takes seconds.
"""

from __future__ import annotations

import json
from pathlib import Path

from cluster.model_cache.gguf_file import GgufFile
from cluster.model_cache.llama_weights import hf_config, require_complete, write_weights
from cluster.model_cache.tokenizer_file import build_tokenizer, special_ids, tokenizer_config
from cluster.progress import Progress, silent

CONVERTER_VERSION = 1
"""Raise it when the files come out differently: folders of other versions are made anew."""


def convert_gguf(gguf_path: Path, folder: Path, progress: Progress = silent) -> None:
    """Fills the existing, empty `folder`. Raises `NoSuchModel` for files it cannot convert faithfully."""
    progress("reading GGUF", 0, 0)
    source = GgufFile(gguf_path)
    require_complete(source)
    tokenizer = build_tokenizer(source)
    ids = special_ids(source)
    config = hf_config(source, vocab_size=source.tensor_shape("token_embd.weight")[0]) | ids
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"_from_model_config": True, **ids})
    _write_json(folder / "tokenizer_config.json", tokenizer_config(source, config["max_position_embeddings"]))
    tokenizer.save(str(folder / "tokenizer.json"))
    write_weights(source, folder / "model.safetensors", lambda done, total: progress("converting weights", done, total))


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
