"""A SentencePiece vocabulary from GGUF splits text as SentencePiece's own rule does, and gives it back."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from cluster.errors import NoSuchModel
from cluster.model_cache.gguf_file import GgufFile
from cluster.model_cache.tokenizer_file import build_tokenizer
from headrace.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{value:02X}>" for value in range(256)]
JOINED = [
    "▁t",
    "he",
    "▁the",
    "▁th",
    "in",
    "er",
    "▁a",
    "an",
    "the",
    "aa",
    "aaa",
    "▁▁",
    "▁▁▁▁",
    "re",
    "here",
    "▁he",
    "ther",
]
LETTERS = [*"▁abcdefhinrt\n", "é", "語"]
PIECES = [*SPECIAL, *BYTES, *JOINED, *LETTERS]
TYPES = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(JOINED) + len(LETTERS))]
SCORES = [0.0] * (3 + 256) + [-float(i) for i in range(len(JOINED) + len(LETTERS))]
"""As in a real model: distinct, the earlier piece the better."""


def write(path: Path, **changes: Any) -> GgufFile:
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(changes.get("tokens", PIECES))
    writer.add_token_scores(changes.get("scores", SCORES))
    writer.add_token_types(changes.get("types", TYPES))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    if "add_bos" in changes:
        writer.add_add_bos_token(changes["add_bos"])
    if "prefix" in changes:
        writer.add_add_space_prefix(changes["prefix"])
    if "charsmap" in changes:
        writer.add_precompiled_charsmap(changes["charsmap"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(path)


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Backend:
    return build_tokenizer(write(tmp_path_factory.mktemp("spm") / "tiny.gguf"))


def by_the_rule(text: str) -> list[str]:
    """SentencePiece's own: join the neighbours that make the piece of the highest score, the leftmost of equals, until
    none do; what then is no piece falls apart into bytes."""
    scores = dict(zip(PIECES[3 + 256 :], SCORES[3 + 256 :], strict=True))
    symbols = list(("▁" + text.replace(" ", "▁")) if text else "")
    while True:
        pairs = [(scores[a + b], -i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in scores]
        if not pairs:
            break
        at = -max(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    return [piece for symbol in symbols for piece in _known(symbol, scores)]


def _known(symbol: str, scores: dict[str, float]) -> Iterator[str]:
    if symbol in scores:
        yield symbol
    else:
        yield from (f"<0x{value:02X}>" for value in symbol.encode())


@given(st.text(alphabet=" abefhinrt\né語ß😀.", max_size=40))
def test_text_is_split_by_scores_alone(backend: Backend, text: str) -> None:
    assert backend.encode(text, add_special_tokens=False).tokens == by_the_rule(text)


@given(st.text(alphabet=" abefhinrt\né語ß😀.", max_size=40))
def test_text_comes_back(backend: Backend, text: str) -> None:
    assert backend.decode(backend.encode(text).ids) == text


def test_bytes_of_tokens_are_those_of_the_text(backend: Backend) -> None:
    """What headrace's incremental detokeniser reads."""
    tokenizer = Tokenizer(backend, vocab_size=len(PIECES), eos_token_ids=(2,), max_context=64)
    ids = tokenizer.encode("the theß😀", add_special=False)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == " the theß😀"


def test_special_tokens_stay_whole_and_the_first_is_bos(backend: Backend) -> None:
    encoded = backend.encode("the</s>")
    assert encoded.tokens == ["<s>", "▁the", "</s>"]
    assert backend.decode(encoded.ids) == "the"


def test_a_file_may_say_that_it_wants_no_bos_and_no_space(tmp_path: Path) -> None:
    backend = build_tokenizer(write(tmp_path / "tiny.gguf", add_bos=False, prefix=False))
    assert backend.encode("the a").tokens == ["the", "▁a"]
    assert backend.decode(backend.encode("the a").ids) == "the a"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"scores": SCORES[:-1]}, "tokens, .* scores and .* types"),
        ({"charsmap": b"\x01\x02"}, "normalises text by a table"),
        ({"tokens": [*PIECES[:10], "<0x>", *PIECES[11:]]}, "no tokens for single bytes"),
        ({"types": [*TYPES[:-1], USER_DEFINED], "tokens": [*PIECES[:-1], "▁▁▁"]}, "tokens of its own with spaces"),
    ],
)
def test_what_scores_do_not_explain_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    source = write(tmp_path / "odd.gguf", **changes)
    with pytest.raises(NoSuchModel, match=rf"odd\.gguf .*{told}"):
        build_tokenizer(source)
