"""Small real tokenizers, trained here in milliseconds, one for each family that token bytes are derived for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from headrace.tokenizer import Tokenizer

SENTENCES = [
    "The turbine turns while the water runs.",
    "DEFGHIJ, then KLMNOP: the alphabet goes on.",
    "日本語の文章と😀🔥絵文字、そして水。",
    "naïve café über straße — “quoted” …",
]
CONFIG = {"vocab_size": 700, "max_position_embeddings": 512, "eos_token_id": 1}


def save(folder: Path, backend: tokenizers.Tokenizer, config: dict[str, object]) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def byte_level_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Byte-level BPE, as GPT-2, Llama 3, Qwen and SmolLM have it; ids 0 and 1 are special."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES, trainer)
    backend.add_tokens(["<tool call>"])
    return save(tmp_path_factory.mktemp("byte_level"), backend, CONFIG)


@pytest.fixture(scope="session")
def tokenizer(byte_level_folder: Path) -> Tokenizer:
    return Tokenizer.load(byte_level_folder)


@pytest.fixture(scope="session")
def byte_fallback_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """SentencePiece's way, as Llama 2 and Gemma have it: U+2581 for a space, `<0xNN>` where a character is unknown."""
    pieces = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "water", "語", "a", "b", "the"]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True, unk_token="</s>")
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer.load(save(tmp_path_factory.mktemp("byte_fallback"), backend, CONFIG))


@pytest.fixture(scope="session")
def word_piece_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A family without byte tokens, for the general way of finding a token's text."""
    pieces = ["[UNK]", "[SEP]", "tur", "##bine", "runs"]
    backend = tokenizers.Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return Tokenizer.load(save(tmp_path_factory.mktemp("word_piece"), backend, CONFIG))
