"""Rebuilds a tokenizer (`tokenizer.json`) from a GGUF file's vocabulary: byte-level BPE here, SentencePiece beside."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cluster.errors import NoSuchModel
from cluster.model_cache.gguf_file import GgufFile
from cluster.model_cache.sentencepiece_file import build_sentencepiece

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CONTROL, _USER_DEFINED = 3, 4
"""GGUF token types that are matched whole before any splitting."""

# The published splitting expressions of the two families, as in their own tokenizer.json files.
_LLAMA3_SPLIT = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def _gpt2(tokenizer: Tokenizer) -> None:
    from tokenizers import pre_tokenizers

    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)


def _smollm(tokenizer: Tokenizer) -> None:
    """Every digit is a word of its own, the rest splits as in GPT-2."""
    from tokenizers import pre_tokenizers

    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


def _split_by(pattern: str) -> Callable[[Tokenizer], None]:
    def apply(tokenizer: Tokenizer) -> None:
        from tokenizers import Regex, pre_tokenizers

        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])

    return apply


def _qwen2(tokenizer: Tokenizer) -> None:
    from tokenizers import normalizers

    tokenizer.normalizer = normalizers.NFC()
    _split_by(_QWEN2_SPLIT)(tokenizer)


def _llama3(tokenizer: Tokenizer) -> None:
    tokenizer.model.ignore_merges = True  # a word that is in the vocabulary stays whole
    _split_by(_LLAMA3_SPLIT)(tokenizer)


PRE_TOKENIZERS: dict[str, Callable[[Tokenizer], None]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "qwen2": _qwen2,
    "llama-bpe": _llama3,
}
"""`tokenizer.ggml.pre` → how text is split before merging."""


def build_tokenizer(source: GgufFile) -> Tokenizer:
    """Raises `NoSuchModel` for a vocabulary of another kind, or one that splits text in a way not known here."""
    kind = source.get("tokenizer.ggml.model")
    if kind == "llama":
        tokenizer = build_sentencepiece(source)
    elif kind == "gpt2":
        tokenizer = _byte_level(source)
    else:
        raise NoSuchModel(
            f"{source.path} has a {kind!r} tokenizer; byte-level BPE ('gpt2') and SentencePiece BPE ('llama') "
            "can be converted"
        )
    # Where a file does not say, SentencePiece models begin with BOS and byte-level ones do not, as in llama.cpp.
    if source.get("tokenizer.ggml.add_bos_token", kind == "llama"):
        _add_bos(tokenizer, source)
    return tokenizer


def _byte_level(source: GgufFile) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models

    split = source.get("tokenizer.ggml.pre", "default")
    if split not in PRE_TOKENIZERS:
        raise NoSuchModel(f"{source.path} splits text by {split!r}; known are {', '.join(PRE_TOKENIZERS)}")
    tokens: list[str] = source.get("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in source.get("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    PRE_TOKENIZERS[split](tokenizer)
    tokenizer.decoder = decoders.ByteLevel()
    types: list[int] = source.get("tokenizer.ggml.token_type", [1] * len(tokens))
    for token, token_type in zip(tokens, types, strict=True):
        if token_type in (_CONTROL, _USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, special=token_type == _CONTROL, normalized=False)])
    return tokenizer


def _add_bos(tokenizer: Tokenizer, source: GgufFile) -> None:
    from tokenizers import processors

    bos = int(source.get("tokenizer.ggml.bos_token_id"))
    token = source.get("tokenizer.ggml.tokens")[bos]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token}:0 $A:0",
        pair=f"{token}:0 $A:0 {token}:1 $B:1",
        special_tokens=[(token, bos)],
    )


def special_ids(source: GgufFile) -> dict[str, int]:
    """`bos_token_id`, `eos_token_id`, `pad_token_id`, as far as the file names them."""
    names = {
        "bos_token_id": "tokenizer.ggml.bos_token_id",
        "eos_token_id": "tokenizer.ggml.eos_token_id",
        "pad_token_id": "tokenizer.ggml.padding_token_id",
    }
    found = {name: source.get(key, None) for name, key in names.items()}
    return {name: int(value) for name, value in found.items() if value is not None}


def tokenizer_config(source: GgufFile, max_context: int) -> dict[str, Any]:
    """The content of tokenizer_config.json, with the chat template where the file has one."""
    tokens: list[str] = source.get("tokenizer.ggml.tokens")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_context,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
    for name, token_id in special_ids(source).items():
        config[name.removesuffix("_id")] = tokens[token_id]
    template = source.get("tokenizer.chat_template", None)
    if template is not None:
        config["chat_template"] = template
    return config
