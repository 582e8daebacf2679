"""The first stop string to complete wins, and nothing is held back for longer than needed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.stop import StopMatcher

STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4)


def run(stops: list[str], pieces: list[str], *, include: bool = False) -> tuple[list[str], bool]:
    """What each piece released, the flushed tail last."""
    matcher = StopMatcher(stops, include)
    shown = [matcher.push(piece)[0] for piece in pieces]
    return [*shown, matcher.flush()], matcher.push("")[1]


def expected(stops: list[str], text: str, *, include: bool = False) -> str:
    """The rule itself, slowly: look at every end in turn."""
    for end in range(1, len(text) + 1):
        if completed := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[:end] if include else text[: end - max(map(len, completed))]
    return text


@pytest.mark.parametrize(
    ("stops", "include", "shown", "stopped"),
    [
        (["DEFGHIJ"], False, ["", "", "", "", "", ""], True),
        (["DEFGHIJ"], True, ["", "", "", "DEFGHIJ", "", ""], True),
        (["GHX", "FGHIK"], False, ["DE", "", "", "FGHIJ", "K", ""], False),
        (["HI", "FGHIJK"], False, ["DE", "", "FG", "", "", ""], True),
        (["zz"], False, ["DEF", "GH", "I", "J", "K", ""], False),
        (["GHI", "HI"], False, ["DEF", "", "", "", "", ""], True),
        ([], False, ["DEF", "GH", "I", "J", "K", ""], False),
    ],
)
def test_pieces_of_the_alphabet(stops: list[str], include: bool, shown: list[str], stopped: bool) -> None:
    assert run(stops, ["DEF", "GH", "I", "J", "K"], include=include) == (shown, stopped)


def test_text_held_at_the_end_is_released() -> None:
    assert run(["DEFGHIJ"], ["DEF", "GH"]) == (["", "", "DEFGH"], False)


@given(stops=STOPS, pieces=st.lists(st.text("abc", max_size=4), max_size=10), include=st.booleans())
def test_any_split_gives_the_rule(stops: list[str], pieces: list[str], include: bool) -> None:
    shown, stopped = run(stops, pieces, include=include)
    text = "".join(pieces)
    assert "".join(shown) == expected(stops, text, include=include)
    assert stopped == any(stop in text for stop in stops)


@given(stops=STOPS, text=st.text("abc", max_size=20))
def test_only_a_possible_beginning_is_held(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops, include=False)
    shown, stopped = matcher.push(text)
    if not stopped:
        held = text[len(shown) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)
        assert not any(text.endswith(stop[:n]) for stop in stops for n in range(len(held) + 1, len(stop)))


def test_unarmed_text_passes_but_may_begin_a_stop() -> None:
    matcher = StopMatcher(["abc"], include=False)
    assert matcher.push("xabcab", armed=False) == ("xabc", False)
    assert matcher.push("c") == ("", True)


def test_nothing_follows_a_match() -> None:
    matcher = StopMatcher(["."], include=False)
    assert matcher.push("one. two.") == ("one", True)
    assert matcher.push(" three") == ("", True)
    assert matcher.flush() == ""
