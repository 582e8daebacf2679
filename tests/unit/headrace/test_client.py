"""The synchronous client against a real server on the loopback."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from headrace import Client, Tls, errors
from headrace.events import Accepted, Delta, Finished
from headrace.frame import FinishReason
from headrace.sampling import SamplingParams
from headrace.wire import ModelInfo


@pytest.fixture
def client(reciter: Any) -> Iterator[Client]:
    with Client(reciter.address) as client:
        yield client


def test_a_stream_is_its_deltas_in_order(client: Client) -> None:
    stream = client.generate("héllo")
    assert list(stream) == [Delta(0, i, (ord(c),), c) for i, c in enumerate("héllo")]
    assert stream.accepted == Accepted("r-1", 5)
    assert stream.finished == Finished(0, FinishReason.STOP, 5, 5)
    assert stream.text() == "héllo"
    assert list(stream) == []


def test_the_id_may_be_asked_first_without_losing_text(client: Client) -> None:
    stream = client.generate("abc")
    assert stream.request_id == "r-1"
    assert next(stream).text == "a"
    assert stream.text() == "abc"


def test_token_ids_and_sampling_arrive_as_given(client: Client, reciter: Any) -> None:
    given = {
        "max_tokens": 2,
        "temperature": 0.5,
        "stop": ["x", "y"],
        "stop_token_ids": [7],
        "seed": -1,
        "ignore_eos": True,
    }
    assert client.generate([97, 98, 99], **given).text() == "ab"
    assert client.generate("q", stop="one string", top_k=None).text() == "q"
    assert reciter.servicer.sampling == [
        SamplingParams(max_tokens=2, temperature=0.5, stop=("x", "y"), stop_token_ids=(7,), seed=-1, ignore_eos=True),
        SamplingParams(stop=("one string",)),
    ]


def test_chat_joins_text_parts(client: Client) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": parts}]
    assert client.chat(messages).text() == "system:s|user:Hello"


def test_models_and_cancel_by_id(client: Client) -> None:
    assert client.models() == (ModelInfo("reciter", 512),)
    assert client.cancel("r-1") is True
    assert client.cancel("r-ended") is False
    with pytest.raises(errors.UnknownRequest) as caught:
        client.cancel("nobody")
    assert caught.value.field == "request_id"


def test_calls_are_spread_over_two_connections(client: Client, reciter: Any) -> None:
    for _ in range(4):
        client.models()
    assert len(reciter.servicer.peers) == 2


@pytest.mark.parametrize(
    ("prompt", "options", "kind", "field", "retry_after_s"),
    [
        ("a", {"temperature": float("nan")}, errors.InvalidRequest, "temperature", None),
        ("a", {"max_tokens": -1}, errors.InvalidRequest, "max_tokens", None),
        ("a", {"model": "nope"}, errors.UnknownModel, "model", None),
        ("busy", {}, errors.Overloaded, None, 1.25),
        ("fail", {}, errors.RequestFailed, None, None),
        ("break off", {}, errors.Unavailable, None, None),
    ],
)
def test_refusals_and_failures_are_our_errors(
    client: Client,
    prompt: str,
    options: dict[str, Any],
    kind: type[errors.HeadraceError],
    field: str,
    retry_after_s: float,
) -> None:
    with pytest.raises(kind) as caught:
        client.generate(prompt, **options).text()
    assert type(caught.value) is kind
    assert (caught.value.field, caught.value.retry_after_s) == (field, retry_after_s)


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ("a", {"temperature": "hot"}, "temperature"),
        ("a", {"max_tokens": 2**70}, "max_tokens"),
        ("a", {"stop": [1]}, "stop"),
        ([-1], {}, "prompt"),
        (5, {}, "prompt"),
        ("\ud800", {}, "prompt"),
    ],
)
def test_what_no_message_can_hold_is_refused_here(
    client: Client, prompt: Any, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        client.generate(prompt, **options)
    assert caught.value.field == field


def test_misspelt_options_and_lost_keys_are_not_dropped(client: Client) -> None:
    with pytest.raises(TypeError, match="temprature"):
        client.generate("a", temprature=0)
    with pytest.raises(errors.InvalidRequest) as caught:
        client.chat([{"role": "user", "content": "a", "tool_calls": [{"id": "1"}]}])
    assert caught.value.field == "messages[0].tool_calls"


def test_leaving_the_block_cancels(client: Client, reciter: Any) -> None:
    with client.generate("wait") as stream:
        assert next(stream).text == "w"
    assert reciter.next_cancelled() == "r-1"


def test_a_dropped_stream_cancels(client: Client, reciter: Any) -> None:
    stream = client.generate("wait")
    next(stream)
    del stream
    gc.collect()
    assert reciter.next_cancelled() == "r-1"


def test_another_thread_may_cancel(client: Client, reciter: Any) -> None:
    stream = client.generate("wait")
    next(stream)
    canceller = threading.Thread(target=stream.cancel)
    canceller.start()
    with pytest.raises(errors.Cancelled):
        stream.text()
    canceller.join()
    assert reciter.next_cancelled() == "r-1"


def test_the_deadline_is_kept(client: Client, reciter: Any) -> None:
    begun = time.monotonic()
    with pytest.raises(errors.DeadlineExceeded):
        client.generate("wait", timeout_s=0.3).text()
    assert time.monotonic() - begun < 5
    assert reciter.next_cancelled() == "r-1"


def test_nobody_there(reciter: Any) -> None:
    with Client("127.0.0.1:1") as lost, pytest.raises(errors.Unavailable):
        lost.models()


def test_the_message_limit_refuses_and_the_channel_goes_on(reciter: Any) -> None:
    with Client(reciter.address, max_message_bytes=1_000) as small:
        with pytest.raises(errors.Overloaded):
            small.generate("x" * 2_000).text()
        assert small.generate("fits").text() == "fits"


def test_missing_certificates_are_told_at_once() -> None:
    with pytest.raises(FileNotFoundError):
        Client(tls=Tls(ca_file="/no/such/ca.pem"))
