"""What `headrace chat` and `generate` read, how they show an answer, and how they tell a refusal."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import NoReturn

import pytest

from cluster.cli.answer import show
from cluster.cli.chat import _read_line
from cluster.cli.request import text_of
from cluster.errors import OperatorError
from headrace.client import Stream
from headrace.errors import InvalidRequest
from headrace.events import Accepted, Delta, Event, Finished
from headrace.frame import FinishReason
from headrace.logprobs import UNTOLD, TokenLogprob
from headrace.v1 import inference_pb2 as pb
from headrace.wire import event_to_proto


def _stdin(monkeypatch: pytest.MonkeyPatch, content: bytes, encoding: str = "ascii") -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), encoding))


def test_standard_input_is_utf8_in_any_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    _stdin(monkeypatch, "日本\n".encode())
    assert text_of("-") == "日本"


def test_other_bytes_are_told_and_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    _stdin(monkeypatch, b"ab\xff")
    with pytest.raises(OperatorError, match="not UTF-8 text: byte 2"):
        text_of("-")
    _stdin(monkeypatch, b"\xff\n", "utf-8")
    with pytest.raises(OperatorError, match="not UTF-8 text"):
        _read_line("")


@pytest.mark.parametrize(
    ("field", "told"),
    [("top_p", "--top-p: too bad"), ("stop[0]", "--stop: too bad"), ("prompt", "too bad"), (None, "too bad")],
)
def test_a_refusal_names_the_flag_where_there_is_one(field: str | None, told: str) -> None:
    def refuse() -> NoReturn:
        raise InvalidRequest("too bad", field=field)

    with pytest.raises(OperatorError) as caught:
        show(refuse, as_json=False)
    assert str(caught.value) == told


class Call:
    """What gRPC hands to a stream: messages, one after the other."""

    def __init__(self, events: list[Event]) -> None:
        self._messages: Iterator[pb.GenerateEvent] = map(event_to_proto, events)

    def __next__(self) -> pb.GenerateEvent:
        return next(self._messages)

    def cancel(self) -> None:
        pass


def two_choices() -> Stream:
    told = TokenLogprob(-0.5, 1, ((8, -0.5), (9, -1.5)))
    events: list[Event] = [
        Accepted("r-1", 3),
        Delta(0, 0, (8,), "up ", (told,)),
        Delta(1, 0, (9,), "down", (UNTOLD,)),
        Finished(1, FinishReason.STOP, 3, 1),
        Delta(0, 1, (9,), "and", (told,)),
        Finished(0, FinishReason.LENGTH, 3, 2),
    ]
    return Stream(Call(events), 2)


def test_several_choices_are_printed_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert show(two_choices, as_json=False, choices=2) == "up and"
    assert capsys.readouterr().out == "0, length:\nup and\n1, stop:\ndown\n"


def test_several_choices_are_a_list_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    show(two_choices, as_json=True, choices=2)
    printed = json.loads(capsys.readouterr().out)
    assert (printed["request_id"], printed["prompt_tokens"]) == ("r-1", 3)
    first, second = printed["choices"]
    likely = {"logprob": -0.5, "rank": 1, "top": [[8, -0.5], [9, -1.5]]}
    assert first == {
        "text": "up and", "token_ids": [8, 9], "finish_reason": "length", "completion_tokens": 2,
        "logprobs": [likely, likely],
    }  # fmt: skip
    assert second["logprobs"] == [{"logprob": None, "rank": 0, "top": []}]


def test_one_choice_is_the_json_object_itself(capsys: pytest.CaptureFixture[str]) -> None:
    events: list[Event] = [Accepted("r-1", 3), Delta(0, 0, (8,), "up"), Finished(0, FinishReason.STOP, 3, 1)]
    assert show(lambda: Stream(Call(events)), as_json=True) == "up"
    printed = json.loads(capsys.readouterr().out)
    assert {"ttft_s", "seconds"} < set(printed)
    assert (printed["text"], printed["finish_reason"], printed["token_ids"]) == ("up", "stop", [8])
    assert "logprobs" not in printed
