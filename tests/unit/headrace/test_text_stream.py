"""One class makes the text for worker and router; stop strings, ending tokens and `min_tokens` meet in it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.frame import FinishReason
from headrace.sampling import SamplingParams
from headrace.text_stream import TextStream
from headrace.tokenizer import Tokenizer


def letters(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token per character."""
    return [tokenizer.encode(c, add_special=False)[0] for c in text]


def run(tokenizer: Tokenizer, params: SamplingParams, ids: list[int]) -> tuple[str, bool, int]:
    stream = TextStream(tokenizer, params)
    text = "".join(stream.push([i]) for i in ids)
    return text + stream.finish(FinishReason.LENGTH), stream.stopped, stream.consumed_tokens


def test_stop_string_counts_the_token_that_completes_it(tokenizer: Tokenizer) -> None:
    ids = letters(tokenizer, "DEFGHIJKL")
    assert run(tokenizer, SamplingParams(stop=("GHI",)), ids) == ("DEF", True, 6)
    kept = SamplingParams(stop=("GHI",), include_stop_str_in_output=True)
    assert run(tokenizer, kept, ids) == ("DEFGHI", True, 6)


def test_tokens_after_the_end_are_ignored_in_one_push_too(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, SamplingParams(stop=("F",)))
    assert stream.push(letters(tokenizer, "DEFGH")) == "DE"
    assert (stream.stopped, stream.consumed_tokens) == (True, 3)
    assert stream.push(letters(tokenizer, "I")) == ""
    assert stream.consumed_tokens == 3


def test_held_text_is_released_at_length(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, SamplingParams(stop=("DEFG",)))
    assert stream.push(letters(tokenizer, "DE")) == ""
    assert stream.finish(FinishReason.LENGTH) == "DE"
    assert stream.finish(FinishReason.LENGTH) == ""


def test_held_text_is_released_when_the_model_ends(tokenizer: Tokenizer) -> None:
    assert run(tokenizer, SamplingParams(stop=("DEFG",)), [*letters(tokenizer, "DE"), 1]) == ("DE", True, 3)


def test_ignored_eos_goes_on_without_text(tokenizer: Tokenizer) -> None:
    ids = [*letters(tokenizer, "D"), 1, *letters(tokenizer, "E")]
    assert run(tokenizer, SamplingParams(ignore_eos=True), ids) == ("DE", False, 3)
    assert run(tokenizer, SamplingParams(), ids) == ("D", True, 2)


@pytest.mark.parametrize(("include", "text"), [(False, "D"), (True, "DE")])
def test_a_stop_token_is_text_only_on_demand(tokenizer: Tokenizer, include: bool, text: str) -> None:
    stop_id = letters(tokenizer, "E")[0]
    params = SamplingParams(stop_token_ids=(stop_id,), include_stop_str_in_output=include, ignore_eos=True)
    assert run(tokenizer, params, letters(tokenizer, "DEF")) == (text, True, 2)


def test_nothing_ends_within_the_first_min_tokens(tokenizer: Tokenizer) -> None:
    params = SamplingParams(min_tokens=3, stop=("E", "GH"))
    assert run(tokenizer, params, letters(tokenizer, "DEFGHEI")) == ("DEF", True, 5)
    straddling = SamplingParams(min_tokens=2, stop=("EF",))
    assert run(tokenizer, straddling, letters(tokenizer, "DEFG")) == ("D", True, 3)


@given(
    text=st.text("ab日😀", max_size=12),
    stops=st.lists(st.text("ab日😀", min_size=1, max_size=3), max_size=3),
    min_tokens=st.integers(0, 6),
    data=st.data(),
)
def test_split_makes_no_difference(
    tokenizer: Tokenizer, text: str, stops: list[str], min_tokens: int, data: st.DataObject
) -> None:
    params = SamplingParams(stop=tuple(stops), min_tokens=min_tokens)
    ids = tokenizer.encode(text, add_special=False)
    cut = data.draw(st.integers(0, len(ids)))
    stream = TextStream(tokenizer, params)
    joined = stream.push(ids[:cut]) + stream.push(ids[cut:]) + stream.finish(FinishReason.LENGTH)
    assert (joined, stream.stopped, stream.consumed_tokens) == run(tokenizer, params, ids)


@pytest.mark.parametrize(
    ("stop", "include", "limit", "text", "stopped", "tokens"),
    [
        (("DEFGHIJ",), False, 32, "", True, 4),
        (("DEFGHIJ",), True, 32, "DEFGHIJ", True, 4),
        (("GHX", "FGHIK"), False, 32, "DEFGHIJKLM", False, 6),
        (("HI", "FGHIJK"), False, 32, "DEFG", True, 3),
        (("DEFGHIJ",), False, 2, "DEFGH", False, 2),
    ],
)
def test_alphabet_of_the_embedded_model(
    model_path: Path, stop: tuple[str, ...], include: bool, limit: int, text: str, stopped: bool, tokens: int
) -> None:
    embedded = Tokenizer.load(model_path)
    pieces = ("DEF", "GH", "I", "J", "K", "LM")  # what the model says after "...alphabet: ABC"
    ids = [i for piece in pieces for i in embedded.encode(piece, add_special=False)]
    assert len(ids) == len(pieces)
    params = SamplingParams(stop=stop, include_stop_str_in_output=include)
    assert run(embedded, params, ids[:limit]) == (text, stopped, tokens)


def test_a_cut_inside_a_character_changes_only_the_end(model_path: Path) -> None:
    embedded = Tokenizer.load(model_path)
    ids = embedded.encode("😀🔥日本語", add_special=False)
    texts = [run(embedded, SamplingParams(), ids[:end])[0] for end in range(len(ids) + 1)]
    assert texts == [
        "",
        "",
        "",
        "😀",
        "😀",
        "😀",
        "😀🔥",
        "😀🔥",
        "😀🔥日",
        "😀🔥日本",
        "😀🔥日本",
        "😀🔥日本",
        "😀🔥日本語",
    ]
