"""Half characters are never shown, and the text depends on the tokens alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from headrace.detokenizer import IncrementalDetokenizer
from headrace.tokenizer import Tokenizer

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.text("😀🔥日本é a", max_size=20)


def text_of(tokenizer: Tokenizer, pieces: Sequence[Sequence[int]]) -> str:
    stream = IncrementalDetokenizer(tokenizer)
    return "".join(stream.push(piece) for piece in pieces) + stream.flush()


def byte_ids(tokenizer: Tokenizer, raw: bytes) -> list[int]:
    """One token per byte."""
    by_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    return [by_byte[bytes([byte])] for byte in raw]


@given(text=TEXT)
def test_token_by_token_gives_whole_characters(tokenizer: Tokenizer, text: str) -> None:
    stream = IncrementalDetokenizer(tokenizer)
    shown = ""
    for byte_id in byte_ids(tokenizer, text.encode("utf-8")):
        shown += stream.push([byte_id])
        assert text.startswith(shown)
    assert shown + stream.flush() == text


@given(ids=st.lists(st.integers(0, 410), max_size=40), data=st.data())
def test_how_tokens_are_split_makes_no_difference(tokenizer: Tokenizer, ids: list[int], data: st.DataObject) -> None:
    """Random ids make invalid UTF-8 too."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    pieces = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    assert text_of(tokenizer, pieces) == text_of(tokenizer, [[i] for i in ids]) == text_of(tokenizer, [ids])


@given(ids=st.lists(st.integers(0, 410), max_size=40))
def test_text_is_that_of_the_library_up_to_the_dropped_tail(tokenizer: Tokenizer, ids: list[int]) -> None:
    """`tokenizers` decodes the whole at once and shows an incomplete last character as U+FFFD, and one that begins a
    surrogate as two.
    """
    raw = b"".join(tokenizer.token_bytes(i) for i in ids if not tokenizer.is_special(i))
    text, whole = text_of(tokenizer, [ids]), raw.decode("utf-8", errors="replace")
    assert whole in (text, text + "\ufffd", text + "\ufffd\ufffd")


def test_impossible_bytes_become_replacement_characters_at_once(tokenizer: Tokenizer) -> None:
    stream = IncrementalDetokenizer(tokenizer)
    assert stream.push(byte_ids(tokenizer, b"a\xf0\x9f")) == "a"
    assert stream.push(byte_ids(tokenizer, b"b")) == "\ufffdb"
    assert stream.push(byte_ids(tokenizer, b"\xff")) == "\ufffd"
    assert stream.push(byte_ids(tokenizer, b"\xe0\x80")) == "\ufffd\ufffd"  # longer than the shortest form
    assert stream.push(byte_ids(tokenizer, b"\xed\xa0a")) == "\ufffd\ufffda"  # a surrogate


def test_an_incomplete_last_character_is_dropped(tokenizer: Tokenizer) -> None:
    whole = byte_ids(tokenizer, "ok 😀".encode())
    assert [text_of(tokenizer, [whole[:end]]) for end in (3, 4, 5, 6, 7)] == ["ok ", "ok ", "ok ", "ok ", "ok 😀"]


def test_special_tokens_are_not_text(tokenizer: Tokenizer) -> None:
    assert text_of(tokenizer, [tokenizer.encode("<|start|>the<|end|>", add_special=False)]) == "the"


def test_byte_fallback_tokens_meet_in_one_character(byte_fallback_tokenizer: Tokenizer) -> None:
    ids = byte_fallback_tokenizer.encode("語€a", add_special=False)
    stream = IncrementalDetokenizer(byte_fallback_tokenizer)
    assert [stream.push([i]) for i in ids] == ["語", "", "", "€", "a"]


def test_emoji_of_the_embedded_model_arrive_whole(model_path: Path) -> None:
    embedded = Tokenizer.load(model_path)
    stream = IncrementalDetokenizer(embedded)
    assert [stream.push([i]) for i in (10813, 242, 218, 10813, 238, 115)] == ["", "", "😀", "", "", "🔥"]
