"""Log probabilities as JSON: tokens that are no whole characters, offsets, likeliest ids, what cannot be told."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from headrace.detokenizer import IncrementalDetokenizer
from headrace.logprobs import UNTOLD, TokenLogprob
from headrace.tokenizer import Tokenizer
from router.ingress.openai_logprobs import LEAST, TextOffsets, chat_content, completion_block, prompt_scores


class Pieces:
    """A vocabulary written out; names in angle brackets are special."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = pieces

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id]

    def is_special(self, token_id: int) -> bool:
        return self._pieces[token_id].startswith(b"<")


SMILE = "😀".encode()
WORDS = Pieces(b"Hel", b"lo ", SMILE[:2], SMILE[2:], b"<end>", "é".encode(), b"\xff", b"lo ")


def test_chat_tells_bytes_beside_readable_text() -> None:
    [first, second] = chat_content(WORDS, [(0, TokenLogprob(-0.5, 1)), (2, TokenLogprob(-1.0, 3, ((5, -0.25),)))])
    assert first == {"token": "Hel", "logprob": -0.5, "bytes": [72, 101, 108], "top_logprobs": []}
    assert second["bytes"] == list(SMILE[:2])
    assert second["token"] == "\\xf0\\x9f"
    assert second["top_logprobs"] == [{"token": "é", "logprob": -0.25, "bytes": [0xC3, 0xA9]}]


def test_bytes_of_all_tokens_together_are_the_text() -> None:
    entries = chat_content(WORDS, [(i, TokenLogprob(-1.0, 1)) for i in (0, 1, 2, 3, 5)])
    joined = b"".join(bytes(entry["bytes"]) for entry in entries)  # type: ignore[call-overload]
    assert joined.decode() == "Hello 😀é"


def test_completions_name_half_a_character_by_its_bytes() -> None:
    scored = [(i, TokenLogprob(-1.0, 1)) for i in (0, 1, 2, 3, 5)]
    block = completion_block(WORDS, scored, TextOffsets(WORDS), 0)
    assert block["tokens"] == ["Hel", "lo ", "bytes:\\xf0\\x9f", "bytes:\\x98\\x80", "é"]
    assert block["token_logprobs"] == [-1.0] * 5
    assert block["top_logprobs"] is None
    assert block["text_offset"] == [0, 3, 6, 6, 7], "both halves of a character begin where it does"


def test_offsets_go_on_from_chunk_to_chunk_and_skip_special_tokens() -> None:
    offsets = TextOffsets(WORDS, start=10)
    scored = [(i, TokenLogprob(-1.0, 1)) for i in (0, 4, 1)]
    assert completion_block(WORDS, scored, offsets, 0)["text_offset"] == [10, 13, 13]
    assert completion_block(WORDS, scored, offsets, 0)["text_offset"] == [16, 19, 19]


def test_a_byte_that_is_no_character_counts_as_the_one_it_is_shown_as() -> None:
    offsets = TextOffsets(WORDS)
    assert [offsets.take(i) for i in (6, 0, 6, 6, 1)] == [0, 1, 4, 5, 6]


@given(ids=st.lists(st.integers(0, 299), max_size=30))
def test_a_token_begins_where_the_text_of_those_before_it_ends(tokenizer: Tokenizer, ids: list[int]) -> None:
    offsets = TextOffsets(tokenizer)
    for i, token_id in enumerate(ids):
        assert offsets.take(token_id) == len(IncrementalDetokenizer(tokenizer).push(ids[:i]))


def test_names_of_special_tokens_count_where_the_prompt_spells_them() -> None:
    spelled = TextOffsets(WORDS, text="Hel<end>lo ")
    assert [spelled.take(i) for i in (0, 4, 1)] == [0, 3, 8]
    added = TextOffsets(WORDS, text="Hello ")
    assert [added.take(i) for i in (4, 0, 1, 4)] == [0, 0, 3, 6]


def test_a_prompt_that_its_tokenizer_shortens_has_no_offset_beyond_its_end() -> None:
    offsets = TextOffsets(WORDS, text="Hello")
    assert [offsets.take(i) for i in (0, 1, 1, 1)] == [0, 3, 5, 5]


def test_the_token_stands_beside_the_likeliest_when_it_is_not_one_of_them() -> None:
    scored = [(0, TokenLogprob(-3.0, 9, ((5, -0.5), (1, -1.0)))), (5, TokenLogprob(-0.5, 1, ((5, -0.5), (1, -1.0))))]
    block = completion_block(WORDS, scored, TextOffsets(WORDS), 2)
    assert block["top_logprobs"] == [{"é": -0.5, "lo ": -1.0, "Hel": -3.0}, {"é": -0.5, "lo ": -1.0}]


def test_of_tokens_that_are_spelled_alike_the_likelier_is_told() -> None:
    block = completion_block(WORDS, [(7, TokenLogprob(-3.0, 9, ((1, -1.0),)))], TextOffsets(WORDS), 1)
    assert block["top_logprobs"] == [{"lo ": -1.0}]


def test_what_is_not_known_is_null_and_what_cannot_be_is_the_least() -> None:
    scored = [(0, UNTOLD), (1, TokenLogprob(-math.inf, 40, ((0, -0.5),)))]
    block = completion_block(WORDS, scored, TextOffsets(WORDS), 1)
    assert block["token_logprobs"] == [None, LEAST]
    assert block["top_logprobs"] == [None, {"Hel": -0.5, "lo ": LEAST}]
    assert [entry["logprob"] for entry in chat_content(WORDS, scored)] == [None, LEAST]


def test_prompt_scores_are_by_id_with_ranks() -> None:
    [first, second] = prompt_scores(WORDS, [(0, UNTOLD), (1, TokenLogprob(-2.0, 7, ((5, -0.5), (0, -1.0))))], 1)
    assert first is None
    assert second == {
        "5": {"logprob": -0.5, "rank": 1, "decoded_token": "é"},
        "1": {"logprob": -2.0, "rank": 7, "decoded_token": "lo "},
    }
