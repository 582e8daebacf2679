"""Messages and values are two forms of one thing; errors arrive as what they were."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from headrace import errors, wire
from headrace.errors import InvalidRequest
from headrace.events import Accepted, Delta, Event, Finished, PromptLogprobs
from headrace.frame import FinishReason
from headrace.logprobs import UNTOLD, TokenLogprob
from headrace.sampling import Grammar, GrammarKind, SamplingParams
from headrace.v1 import inference_pb2 as pb

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
U32 = st.integers(0, 2**32 - 1)
LOGPROBS = st.lists(
    st.just(UNTOLD)
    | st.builds(
        TokenLogprob,
        st.floats(-100, 0),
        st.integers(1, 2**32 - 1),
        st.lists(st.tuples(U32, st.floats(-100, 0)), max_size=3).map(tuple),
    ),
    max_size=4,
).map(tuple)
EVENTS = (
    st.builds(Accepted, TEXT, U32)
    | st.builds(Delta, U32, U32, st.lists(U32).map(tuple), TEXT, LOGPROBS)
    | st.builds(PromptLogprobs, st.lists(U32).map(tuple), LOGPROBS)
    | st.builds(Finished, U32, st.sampled_from(FinishReason), U32, U32, TEXT)
)
SAMPLING = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": st.integers(1, 2**31 - 1),
        "temperature": st.floats(0, 100),
        "top_p": st.floats(0.01, 1),
        "top_k": st.integers(0, 100),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "stop": st.lists(st.text("ab\n😀", min_size=1, max_size=5), max_size=3).map(tuple),
        "include_stop_str_in_output": st.booleans(),
        "stop_token_ids": st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple),
        "min_p": st.floats(0, 1),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.01, 10),
        "logit_bias": st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100), max_size=3).map(
            lambda biases: tuple(sorted(biases.items()))
        ),
        "logprobs": st.integers(0, 20),
        "prompt_logprobs": st.integers(0, 20),
        "ignore_eos": st.booleans(),
    },
)


@given(event=EVENTS)
def test_events_round_trip(event: Event) -> None:
    packed = wire.event_to_proto(event).SerializeToString()
    assert wire.event_from_proto(pb.GenerateEvent.FromString(packed)) == event


@given(prompt=TEXT | st.lists(U32).map(tuple), sampling=SAMPLING)
def test_generate_requests_round_trip(prompt: str | tuple[int, ...], sampling: dict[str, Any]) -> None:
    packed = wire.generate_request_to_proto(prompt, "m", sampling).SerializeToString()
    call = wire.generate_request_from_proto(pb.GenerateRequest.FromString(packed))
    assert call == wire.GenerateCall("m", prompt, SamplingParams(**sampling))


def test_chat_requests_round_trip() -> None:
    messages = [{"role": "user", "content": ""}, {"role": "assistant", "content": None, "tool_calls": []}]
    call = wire.chat_request_from_proto(wire.chat_request_to_proto(messages, "m", {"max_tokens": 3}))
    assert call.messages == ({"role": "user", "content": ""}, {"role": "assistant", "content": ""})
    assert call.sampling == SamplingParams(max_tokens=3)


def test_what_is_not_set_is_absent_for_the_template_to_judge() -> None:
    request = pb.ChatRequest(messages=[pb.ChatMessage(role="user"), pb.ChatMessage(content="hi")])
    assert wire.chat_request_from_proto(request).messages == ({"role": "user"}, {"content": "hi"})


def test_a_prompt_that_is_not_unicode_is_told_as_such() -> None:
    with pytest.raises(InvalidRequest, match="not valid Unicode") as caught:
        wire.generate_request_to_proto("a\ud800")
    assert caught.value.field == "prompt"


def test_a_missing_prompt_is_not_an_empty_one() -> None:
    with pytest.raises(InvalidRequest) as caught:
        wire.generate_request_from_proto(pb.GenerateRequest(model="m"))
    assert caught.value.field == "prompt"
    assert wire.generate_request_from_proto(pb.GenerateRequest(text="")).prompt == ""
    assert wire.generate_request_from_proto(pb.GenerateRequest(token_ids=pb.TokenIds())).prompt == ()


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        (pb.SamplingParams(max_tokens=0), "max_tokens"),
        (pb.SamplingParams(max_tokens=2**40), "max_tokens"),
        (pb.SamplingParams(max_tokens=2, min_tokens=3), "min_tokens"),
        (pb.SamplingParams(temperature=float("nan")), "temperature"),
        (pb.SamplingParams(temperature=-0.1), "temperature"),
        (pb.SamplingParams(top_p=0.0), "top_p"),
        (pb.SamplingParams(top_p=float("inf")), "top_p"),
        (pb.SamplingParams(top_k=-1), "top_k"),
        (pb.SamplingParams(stop=["ok", ""]), "stop[1]"),
        (pb.SamplingParams(stop=["x"] * 17), "stop"),
        (pb.SamplingParams(stop_token_ids=[-5]), "stop_token_ids[0]"),
        (pb.SamplingParams(min_p=1.5), "min_p"),
        (pb.SamplingParams(presence_penalty=-2.5), "presence_penalty"),
        (pb.SamplingParams(frequency_penalty=float("nan")), "frequency_penalty"),
        (pb.SamplingParams(repetition_penalty=0), "repetition_penalty"),
        (pb.SamplingParams(logit_bias={-1: 1.0}), "logit_bias"),
        (pb.SamplingParams(logit_bias={5: 101.0}), "logit_bias"),
        (pb.SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0)), "logit_bias"),
        (pb.SamplingParams(logprobs=21), "logprobs"),
        (pb.SamplingParams(prompt_logprobs=-1), "prompt_logprobs"),
    ],
)
def test_bounds_are_named(sampling: pb.SamplingParams, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        wire.generate_request_from_proto(pb.GenerateRequest(text="a", sampling=sampling))
    assert caught.value.field == field


def test_events_of_a_newer_server_do_no_harm() -> None:
    assert wire.event_from_proto(pb.GenerateEvent()) is None
    assert wire.event_from_proto(pb.GenerateEvent.FromString(bytes.fromhex("4a0108"))) is None, "an event number 9"
    unknown = pb.GenerateEvent.FromString(bytes.fromhex("1a021063"))  # finished { reason: 99 }
    event = wire.event_from_proto(unknown)
    assert isinstance(event, Finished)
    assert (event.reason, "99" in event.detail) == (FinishReason.FAILED, True)


@pytest.mark.parametrize("kind", errors.tree(), ids=lambda kind: kind.__name__)
def test_every_error_arrives_as_what_it_was(kind: type[errors.HeadraceError]) -> None:
    status = wire.status_from_error(kind("why", field="messages[0].content", retry_after_s=0.2501))
    assert status.code.name == kind.status.grpc
    error = wire.error_from_status(status.code, status.message, status.metadata)
    assert (type(error), error.message, error.field, error.retry_after_s) == (kind, "why", "messages[0].content", 0.251)


def test_a_status_is_one_short_printable_line() -> None:
    error = InvalidRequest("two\nlines 😀 " + "x" * 100_000, field="mess\nage é" + "y" * 5_000)
    status = wire.status_from_error(error)
    assert "\n" not in status.message
    assert len(status.message) <= 1_000
    fields = dict(status.metadata)
    assert str(fields[wire.FIELD_KEY]).isprintable()
    assert sum(len(key) + len(value) for key, value in status.metadata) < 4_096


def test_standard_details_say_the_same() -> None:
    status = wire.status_from_error(errors.Overloaded("full", retry_after_s=2.0))
    retry = error_details_pb2.RetryInfo()
    packed = status_pb2.Status.FromString(bytes(dict(status.metadata)[wire.DETAILS_KEY]))  # type: ignore[arg-type]
    assert packed.code == status.code.value[0]
    assert packed.details[0].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 2_000
    status = wire.status_from_error(InvalidRequest("bad", field="stop[1]"))
    bad = error_details_pb2.BadRequest()
    packed = status_pb2.Status.FromString(bytes(dict(status.metadata)[wire.DETAILS_KEY]))  # type: ignore[arg-type]
    assert packed.details[0].Unpack(bad)
    assert bad.field_violations[0].field == "stop[1]"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.Unavailable),
        (grpc.StatusCode.OUT_OF_RANGE, errors.TooLong),
        (grpc.StatusCode.UNIMPLEMENTED, errors.HeadraceError),
    ],
)
def test_statuses_of_others_become_the_nearest_error(code: grpc.StatusCode, kind: type[errors.HeadraceError]) -> None:
    metadata = ((wire.ERROR_KEY, "os.system"), (wire.RETRY_KEY, "soon"), ("x-bin", b"\x00"))
    error = wire.error_from_status(code, "proxy says no", metadata)
    assert (type(error), error.retry_after_s) == (kind, None)


def test_the_client_needs_only_grpcio_and_protobuf() -> None:
    """What else is installed is hidden from a fresh interpreter."""
    program = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"tokenizers", "jinja2", "msgpack", "numpy", "redis", "torch", "ray", "transformers"}:
            raise ModuleNotFoundError(name)
        if name == "google.rpc":
            return None
sys.meta_path.insert(0, Hide())
import headrace
assert "grpc" not in sys.modules
headrace.Client, headrace.AsyncClient, headrace.SamplingParams
try:
    headrace.nonsense
except AttributeError as fault:
    print(fault)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "module 'headrace' has no attribute 'nonsense'\n"), done.stderr


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"json_schema": {"type": "object"}}, Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}')),
        ({"json_schema": "{}"}, Grammar(GrammarKind.JSON_SCHEMA, "{}")),
        ({"json_schema": True}, Grammar(GrammarKind.JSON_SCHEMA, "true")),
        ({"regex": "a+"}, Grammar(GrammarKind.REGEX, "a+")),
        ({"ebnf": 'start: "a"'}, Grammar(GrammarKind.EBNF, 'start: "a"')),
        ({"choice": ["é", '"']}, Grammar(GrammarKind.CHOICE, '["é", "\\""]')),
        (Grammar(GrammarKind.CHOICE, '["a","b"]'), Grammar(GrammarKind.CHOICE, '["a", "b"]')),
    ],
)
def test_a_grammar_reaches_the_server_as_it_was_meant(given: object, meant: Grammar) -> None:
    assert wire.sampling_from_proto(wire.sampling_to_proto({"grammar": given})).grammar == meant


@pytest.mark.parametrize(
    "bad", ["a+", {}, {"regex": "a", "ebnf": "b"}, {"lark": "a"}, {"choice": [1]}, {"choice": 5}, {"regex": b"\xff"}]
)
def test_a_grammar_that_no_message_can_hold_is_refused_at_the_client(bad: object) -> None:
    with pytest.raises(InvalidRequest) as refused:
        wire.sampling_to_proto({"grammar": bad})
    assert (refused.value.field or "").startswith("grammar")


def test_a_grammar_of_no_kind_is_refused() -> None:
    with pytest.raises(InvalidRequest) as refused:
        wire.sampling_from_proto(pb.SamplingParams(grammar=pb.Grammar()))
    assert refused.value.field == "grammar"


def test_numbers_of_a_call_are_sent_only_where_given() -> None:
    sent = wire.generate_request_to_proto("a", n=3, best_of=None, priority=0)
    assert [field.name for field, _ in sent.ListFields()] == ["text", "sampling", "n", "priority"]
    call = wire.generate_request_from_proto(sent)
    assert (call.n, call.best_of, call.priority) == (3, None, 0)
    chat = wire.chat_request_from_proto(wire.chat_request_to_proto([{"role": "user", "content": "a"}], best_of=2))
    assert (chat.n, chat.best_of, chat.priority) == (1, 2, 0)
    for name, value in (("n", True), ("n", 2**63), ("best_of", "two"), ("priority", 0.5)):
        with pytest.raises(InvalidRequest) as refused:
            wire.generate_request_to_proto("a", **{name: value})  # type: ignore[arg-type]
        assert refused.value.field == name


@pytest.mark.parametrize("bias", [3, {"a": 1}, {5: "x"}, {2**63: 1.0}, [(1, 2, 3)]])
def test_a_bias_that_no_message_can_hold_is_named(bias: object) -> None:
    with pytest.raises(InvalidRequest) as refused:
        wire.sampling_to_proto({"logit_bias": bias})
    assert refused.value.field == "logit_bias"


def test_clients_know_the_parameters_that_servers_carry_out() -> None:
    with pytest.raises(TypeError, match="unknown sampling parameter"):
        wire.sampling_to_proto({"gramar": 1})
