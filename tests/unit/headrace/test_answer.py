"""One stream's messages become one output for each choice, or an error where the server left something out."""

from __future__ import annotations

import pytest

from headrace.answer import StreamFold
from headrace.errors import RequestFailed, Unavailable
from headrace.events import Accepted, Delta, Event, Finished, PromptLogprobs
from headrace.frame import FinishReason
from headrace.logprobs import UNTOLD, TokenLogprob
from headrace.v1 import inference_pb2 as pb
from headrace.wire import event_to_proto

TOLD = TokenLogprob(-0.5, 1)


def folded(choices: int, *events: Event) -> StreamFold:
    fold = StreamFold(choices)
    for event in events:
        fold.take(event_to_proto(event))
    return fold


def test_choices_that_come_in_turns_are_kept_apart() -> None:
    end = Finished(1, FinishReason.STOP, 3, 1)
    fold = folded(
        2,
        Accepted("r", 3),
        PromptLogprobs((5, 6), (UNTOLD, TOLD)),
        Delta(0, 0, (10,), "a", (TOLD,)),
        Delta(1, 0, (20,), "x", (UNTOLD,)),
        end,
        Delta(0, 1, (11, 12), "b", (TOLD, TOLD)),
    )
    first, second = fold.outputs
    assert (first.text, first.token_ids, first.finished, first.logprobs) == ("ab", (10, 11, 12), None, (TOLD,) * 3)
    assert (second.text, second.token_ids, second.finished) == ("x", (20,), end)
    assert (fold.finished, fold.complete) == (None, False)
    assert [delta.choice for delta in fold.pending] == [0, 1, 0], "deltas are handed on as they came"
    assert fold.prompt_logprobs is not None
    assert fold.prompt_logprobs.token_ids == (5, 6)


def test_every_choice_has_to_end() -> None:
    fold = folded(2, Accepted("r", 3), Finished(0, FinishReason.LENGTH, 3, 0))
    with pytest.raises(Unavailable, match="ended before the output was finished"):
        fold.end()
    fold.take(event_to_proto(Finished(1, FinishReason.STOP, 3, 0)))
    fold.end()
    assert fold.complete


def test_a_choice_that_says_nothing_is_there_too() -> None:
    assert [(output.choice, output.text) for output in folded(3).outputs] == [(0, ""), (1, ""), (2, "")]


def test_a_choice_that_nobody_asked_for_is_no_answer() -> None:
    with pytest.raises(Unavailable, match="sent choice 2, and only 2 were asked for"):
        folded(2, Delta(2, 0, (1,), "a"))


def test_one_failed_choice_fails_the_request() -> None:
    with pytest.raises(RequestFailed, match="the logits were NaN"):
        folded(2, Finished(1, FinishReason.FAILED, 3, 0, "the logits were NaN"))


def test_an_event_of_a_newer_server_is_passed_over() -> None:
    fold = StreamFold()
    fold.take(pb.GenerateEvent())
    assert (fold.accepted, list(fold.pending)) == (None, [])
