"""Text to token ids and token ids to bytes, for any Hugging Face folder, through the light `tokenizers` library.

Needs the `tokenizers` package (not torch, not transformers). Every token is given its *bytes*, whatever family the
tokenizer is of, so that everything after it (`detokenizer`, `stop`) has one way of working.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import HeadraceError
from headrace.unicode import require_unicode

if TYPE_CHECKING:
    import tokenizers

_CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")
_SANE_CONTEXT = 1 << 32
"""Hugging Face writes 10**30 for "unknown"."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """Immutable after `load`; safe to call from several threads at once."""

    def __init__(
        self, backend: tokenizers.Tokenizer, *, vocab_size: int, eos_token_ids: tuple[int, ...], max_context: int
    ) -> None:
        self._backend = backend
        self.vocab_size = vocab_size
        """Rows of the model's embedding: every id below it may be sent, even one that has no text."""
        self.eos_token_ids = eos_token_ids
        self.max_context = max_context
        """Tokens of prompt and output together, from config.json."""
        self._special = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        self._bytes = _token_bytes_table(backend)

    @classmethod
    def load(cls, model_path: str | Path) -> Tokenizer:
        """Reads tokenizer.json and config.json (and, where there, generation_config.json and tokenizer_config.json).

        Raises HeadraceError with one sentence where a file is missing or says too little.
        """
        import tokenizers

        folder = Path(model_path)
        config = _read_json(folder / "config.json", required=True)
        config = {**config, **config.get("text_config", {})}
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise HeadraceError(f"{folder} has no tokenizer.json")
        backend = tokenizers.Tokenizer.from_file(str(path))
        # What a file says about truncation or padding is for training; here it would silently change prompts.
        backend.no_truncation()
        backend.no_padding()
        about = _read_json(folder / "tokenizer_config.json")
        return cls(
            backend,
            vocab_size=int(config.get("vocab_size") or backend.get_vocab_size()),
            eos_token_ids=_eos_ids(backend, config, _read_json(folder / "generation_config.json"), about),
            max_context=_max_context(folder, config, about),
        )

    def encode(self, text: str, *, add_special: bool, field: str = "prompt") -> list[int]:
        """Token ids of `text`; the names of special tokens in it become those tokens.

        `add_special` adds what the model wants around a plain prompt (a BOS, for some); a rendered chat template has
        it already. Raises InvalidRequest naming `field` where the text is not valid Unicode.
        """
        require_unicode(text, field)
        # A batch of one: `encode` would hold the interpreter lock all the while, and every other thread with it.
        [encoded] = self._backend.encode_batch_fast([text], add_special_tokens=add_special)
        return list(encoded.ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes a token stands for, possibly part of a character; empty for an id without text."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def is_special(self, token_id: int) -> bool:
        """True for control tokens (EOS, turn marks), which are never shown as text."""
        return token_id in self._special


def _read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    if not path.is_file():
        if required:
            raise HeadraceError(f"{path.parent} has no {path.name}")
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as fault:
        raise HeadraceError(f"{path} is not JSON: {fault}") from fault
    if not isinstance(content, dict):
        raise HeadraceError(f"{path} is not a JSON object")
    return content


def _eos_ids(backend: tokenizers.Tokenizer, *sources: dict[str, Any]) -> tuple[int, ...]:
    """All ids that any of the files calls an end, first mention first: models disagree with themselves here."""
    found: list[int] = []
    for source in sources:
        ids = source.get("eos_token_id")
        found.extend(ids if isinstance(ids, list) else [] if ids is None else [ids])
        name = token_text(source.get("eos_token"))
        if name and (token_id := backend.token_to_id(name)) is not None:
            found.append(token_id)
    return tuple(dict.fromkeys(found))


def token_text(entry: object) -> str:
    """The text of a special token as tokenizer_config.json writes it: a string or an object with `content`."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else ""


def _max_context(folder: Path, config: dict[str, Any], about: dict[str, Any]) -> int:
    for name in _CONTEXT_NAMES:
        if isinstance(config.get(name), int):
            return int(config[name])
    length = about.get("model_max_length")
    if isinstance(length, int | float) and 0 < length < _SANE_CONTEXT:
        return int(length)
    raise HeadraceError(f"{folder / 'config.json'} does not say how long a context may be ({_CONTEXT_NAMES[0]})")


def _token_bytes_table(backend: tokenizers.Tokenizer) -> tuple[bytes, ...]:
    """Per id its bytes, by the family that the decoder in tokenizer.json names."""
    vocab = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    kinds = _decoder_kinds(json.loads(backend.to_str()).get("decoder"))
    if "ByteLevel" in kinds:
        alphabet = _byte_level_alphabet()
        for token, token_id in vocab.items():
            table[token_id] = _byte_level_bytes(token, alphabet)
    elif kinds & {"ByteFallback", "Metaspace"}:
        for token, token_id in vocab.items():
            table[token_id] = _sentencepiece_bytes(token)
    else:
        for token_id in vocab.values():
            table[token_id] = _difference_bytes(backend, token_id)
    return tuple(table)


def _decoder_kinds(decoder: dict[str, Any] | None) -> frozenset[str]:
    if decoder is None:
        return frozenset()
    inner = (_decoder_kinds(step) for step in decoder.get("decoders", ()))
    return frozenset({str(decoder.get("type"))}).union(*inner)


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: visible Latin-1 stands for itself, the rest from U+0100 on."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


def _byte_level_bytes(token: str, alphabet: dict[str, int]) -> bytes:
    # Added tokens are plain text: one with a character outside the alphabet is taken as it stands.
    return bytes(alphabet[c] for c in token) if all(c in alphabet for c in token) else token.encode("utf-8")


def _sentencepiece_bytes(token: str) -> bytes:
    """`<0xE3>` is a byte and U+2581 a space. Output continues a prompt, so the first space of a text is kept."""
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace("▁", " ").encode("utf-8")


def _difference_bytes(backend: tokenizers.Tokenizer, token_id: int) -> bytes:
    """For any other decoder: what one more token adds to the text of two."""
    before = backend.decode([token_id, token_id], skip_special_tokens=False)
    after = backend.decode([token_id, token_id, token_id], skip_special_tokens=False)
    return after[len(before) :].encode("utf-8")
