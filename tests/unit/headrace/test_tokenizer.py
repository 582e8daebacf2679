"""Token bytes for each tokenizer family, and what the folder's files say."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import HeadraceError, InvalidRequest
from headrace.tokenizer import Tokenizer

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@given(text=TEXT)
def test_byte_level_tokens_join_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode("utf-8")


def test_special_and_added_tokens_have_their_own_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|start|>a<tool call>", add_special=False)
    assert [tokenizer.is_special(i) for i in ids] == [True, False, False]
    assert tokenizer.token_bytes(ids[2]) == b"<tool call>"


def test_byte_fallback_tokens_are_bytes_and_spaces(byte_fallback_tokenizer: Tokenizer) -> None:
    ids = byte_fallback_tokenizer.encode("語€", add_special=False)
    assert [byte_fallback_tokenizer.token_bytes(i) for i in ids] == ["語".encode(), b"\xe2", b"\x82", b"\xac"]
    by_text = {byte_fallback_tokenizer.token_bytes(i) for i in range(byte_fallback_tokenizer.vocab_size)}
    assert b" the" in by_text
    assert b" " in by_text


def test_word_pieces_join_as_their_decoder_joins_them(word_piece_tokenizer: Tokenizer) -> None:
    assert [word_piece_tokenizer.token_bytes(i) for i in (2, 3, 4)] == [b" tur", b"bine", b" runs"]


def test_ids_without_text_are_empty(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 700  # the model's rows, more than the tokenizer knows
    assert [tokenizer.token_bytes(i) for i in (699, 10_000, -1)] == [b"", b"", b""]
    assert tokenizer.encode("", add_special=True) == []


def test_a_lone_surrogate_names_the_field(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="lone surrogate at character 2") as caught:
        tokenizer.encode("ab\ud800", add_special=False, field="prompt[3]")
    assert caught.value.field == "prompt[3]"


def test_all_files_have_a_say_in_what_ends(byte_level_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(byte_level_folder, tmp_path / "model")
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 1]}', encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|start|>"}}', encoding="utf-8")
    assert Tokenizer.load(folder).eos_token_ids == (1, 7, 0)


def test_truncation_for_training_does_not_shorten_prompts(byte_level_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(byte_level_folder, tmp_path / "model")
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(max_length=2)
    backend.enable_padding(length=64)
    backend.save(str(folder / "tokenizer.json"))
    assert len(Tokenizer.load(folder).encode("The water runs on and on", add_special=False)) > 2


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"n_positions": 64}, 64),
        ({"text_config": {"max_position_embeddings": 32, "vocab_size": 9}}, 32),
        ({"n_positions": "many"}, 2048),
    ],
)
def test_context_length_comes_from_the_config(
    byte_level_folder: Path, tmp_path: Path, config: dict[str, object], expected: int
) -> None:
    folder = shutil.copytree(byte_level_folder, tmp_path / "model")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 2048}', encoding="utf-8")
    assert Tokenizer.load(folder).max_context == expected


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("config.json", None, "has no config.json"),
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("config.json", "{", "is not JSON"),
        ("config.json", "[]", "is not a JSON object"),
        ("config.json", "{}", "does not say how long a context may be"),
    ],
)
def test_a_poor_folder_is_refused_in_one_sentence(
    byte_level_folder: Path, tmp_path: Path, name: str, content: str | None, sentence: str
) -> None:
    folder = shutil.copytree(byte_level_folder, tmp_path / "model")
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content, encoding="utf-8")
    with pytest.raises(HeadraceError, match=sentence):
        Tokenizer.load(folder)


def test_threads_share_one_tokenizer(tokenizer: Tokenizer) -> None:
    texts = [f"turbine {i} 日本語 😀" * 20 for i in range(64)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda text: tokenizer.encode(text, add_special=True), texts))
    assert together == [tokenizer.encode(text, add_special=True) for text in texts]


def test_other_threads_go_on_while_a_long_text_is_encoded(tokenizer: Tokenizer) -> None:
    text = "a b " * 200_000
    with ThreadPoolExecutor(1) as pool:
        encoding = pool.submit(tokenizer.encode, text, add_special=False)
        beats = 0
        while not encoding.done():
            wait((encoding,), timeout=0.001)
            beats += 1
    assert encoding.result()
    assert beats > 20, "the interpreter was locked while the text was encoded"


def test_the_embedded_model_has_its_known_ids(model_path: Path) -> None:
    embedded = Tokenizer.load(model_path)
    assert (embedded.vocab_size, embedded.max_context, embedded.eos_token_ids) == (49152, 8192, (2,))
    assert embedded.encode("😀🔥 the", add_special=True) == [10813, 242, 218, 10813, 238, 115, 260]
    assert embedded.encode("日本語", add_special=True) == [23274, 115, 40993, 179, 120, 248]
    assert embedded.encode("", add_special=True) == []
    assert [embedded.is_special(i) for i in (0, 1, 2, 260)] == [True, True, True, False]
