"""Every token index once and in order, whatever arrives; a slow reader; a reader that goes."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import Cancelled, Moved
from headrace.events import Accepted, Delta, Event, Finished
from headrace.frame import FinishReason
from headrace.logprobs import TokenLogprob
from router.delivery.progress import ChoiceProgress
from router.delivery.stream import RequestStream


class LetterText:
    """Token 0 is "a", 1 is "b", …; one letter is always held back, as half a character would be."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, token_ids: tuple[int, ...]) -> str:
        text = self._held + "".join(chr(ord("a") + token) for token in token_ids)
        self._held = text[-1:]
        return text[:-1]

    def finish(self, reason: FinishReason) -> str:
        return self._held


def _progress(choice: int = 0) -> ChoiceProgress:
    return ChoiceProgress(choice, 7, LetterText())


def _stream(choices: int = 1, left: list[RequestStream] | None = None) -> RequestStream:
    gone: list[RequestStream] = [] if left is None else left
    return RequestStream(
        "t-1",
        "default",
        tuple(_progress(i) for i in range(choices)),
        on_leave=gone.append,
        observe=lambda events: None,
        on_unfinished=lambda error: None,
        clock=lambda: 1.0,
    )


async def _read(stream: RequestStream) -> list[Event]:
    return [event async for event in stream]


def _join(events: list[Event]) -> tuple[tuple[int, ...], str]:
    deltas = [event for event in events if isinstance(event, Delta)]
    for before, after in itertools.pairwise(deltas):
        assert after.first_index == before.first_index + len(before.token_ids)
    return sum((d.token_ids for d in deltas), ()), "".join(d.text for d in deltas)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6)), max_size=30))
def test_any_overlapping_or_repeated_parts_give_a_prefix_once_and_in_order(parts: list[tuple[int, int]]) -> None:
    tokens = tuple(range(12))
    progress, seen, text = ChoiceProgress(0, 7, LetterText(), tops=0), (), ""
    logprobs = tuple(TokenLogprob(-float(token), 1) for token in tokens)
    for first, length in parts:
        before = progress.next_index
        told = logprobs[first : first + length]
        events = progress.take(first, tokens[first : first + length], logprobs=told)
        if first > before:
            assert events is None
            continue
        for event in events or ():
            assert isinstance(event, Delta)
            assert event.first_index == len(seen)
            assert [-one.logprob for one in event.logprobs] == list(event.token_ids)
            seen, text = seen + event.token_ids, text + event.text
        assert progress.next_index == max(before, min(first + length, 12))
    assert seen == tokens[: progress.next_index]
    end = progress.take(progress.next_index, (), FinishReason.LENGTH)
    assert end is not None
    assert text + "".join(e.text for e in end if isinstance(e, Delta)) == "abcdefghijkl"[: len(seen)]
    assert end[-1] == Finished(0, FinishReason.LENGTH, 7, len(seen))


def test_a_finish_beyond_a_hole_does_not_end_the_choice_short() -> None:
    progress = _progress()
    progress.take(0, (0, 1))
    assert progress.take(3, (3,), FinishReason.STOP) is None
    assert not progress.finished
    events = progress.take(2, (2, 3), FinishReason.STOP)
    assert events is not None
    assert events[-1] == Finished(0, FinishReason.STOP, 7, 4)


def test_nothing_follows_an_end() -> None:
    progress = _progress()
    progress.take(0, (0,), FinishReason.STOP)
    assert progress.take(1, (1, 2)) == ()
    assert progress.take(9, ()) == ()


async def test_first_token_is_there_at_once_and_later_ones_merge_for_a_slow_reader() -> None:
    stream = _stream()
    stream.accept(7)
    stream.feed(0, 0, (0, 1), None, "")
    assert await anext(stream) == Accepted("t-1", 7)
    assert await anext(stream) == Delta(0, 0, (0, 1), "a")
    for index in range(2, 9):
        stream.feed(0, index, (index,), None, "")
    assert await anext(stream) == Delta(0, 2, (2, 3, 4, 5, 6, 7, 8), "bcdefgh")
    stream.feed(0, 9, (9,), FinishReason.LENGTH, "")
    assert await _read(stream) == [Delta(0, 9, (9,), "ij"), Finished(0, FinishReason.LENGTH, 7, 10)]


async def test_what_waits_for_a_reader_who_never_comes_stays_small() -> None:
    stream = _stream(choices=2)
    stream.accept(7)
    for index in range(24):
        stream.feed(0, index, (index,), None, "")
        stream.feed(1, index, (index,), None, "")
    stream.feed(0, 24, (24,), FinishReason.LENGTH, "")
    stream.feed(1, 24, (24,), FinishReason.LENGTH, "")
    events = await _read(stream)
    assert len(events) == 5
    for choice in (0, 1):
        mine = [e for e in events if isinstance(e, Delta) and e.choice == choice]
        assert _join(mine)[0] == tuple(range(25))  # type: ignore[arg-type]


async def test_a_reader_that_waits_is_woken_by_a_part_and_by_a_break() -> None:
    stream = _stream()
    stream.accept(7)
    reading = asyncio.create_task(_read(stream))
    await asyncio.sleep(0)
    stream.feed(0, 0, (0, 1), None, "")
    await asyncio.sleep(0)
    stream.break_with(Moved("elsewhere"))
    with pytest.raises(Moved):
        await asyncio.wait_for(reading, 1)


async def test_the_first_break_stands_and_an_ended_stream_cannot_break() -> None:
    stream = _stream()
    stream.break_with(Moved("first"))
    stream.break_with(Cancelled("second"))
    with pytest.raises(Moved, match="first"):
        await anext(stream)
    ended = _stream()
    ended.feed(0, 0, (0,), FinishReason.STOP, "")
    ended.break_with(Cancelled("late"))
    assert len(await _read(ended)) == 2


async def test_leaving_is_told_exactly_once() -> None:
    left: list[RequestStream] = []
    stream = _stream(left=left)
    async with stream:
        stream.leave()
    assert left == [stream]


def test_a_hole_is_remembered_until_the_journal_was_read() -> None:
    stream = _stream()
    assert not stream.feed(0, 2, (2,), None, "")
    assert stream.behind


def test_a_part_of_a_choice_that_was_not_asked_for_is_dropped() -> None:
    stream = _stream()
    assert stream.feed(3, 0, (0,), None, "")
    assert not stream.behind
