"""A message that cannot be parsed is the caller's error, with the field's name where text is to blame."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError, Message

from headrace.undecodable import undecodable
from headrace.v1 import inference_pb2 as pb

BAD = b"?!?"
CHAT = pb.ChatRequest(
    messages=[pb.ChatMessage(role="user", content="fine"), pb.ChatMessage(role="user", content="?!?")],
)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.GenerateRequest(text="ab?!?"), "prompt"),
        (pb.GenerateRequest(model="?!?", text="ab"), "model"),
        (pb.GenerateRequest(text="a", sampling=pb.SamplingParams(stop=["ok", "?!?"])), "stop[1]"),
        (CHAT, "messages[1].content"),
        (pb.CancelRequest(request_id="?!?"), "request_id"),
    ],
)
def test_text_that_is_not_utf8_is_named(message: Message, field: str) -> None:
    raw = message.SerializeToString().replace(BAD, b"\xff\xfe\xfd")
    with pytest.raises(DecodeError):
        type(message).FromString(raw)
    error = undecodable(type(message), raw)
    assert error.field == field
    assert "not valid UTF-8" in error.message


@pytest.mark.parametrize("raw", [b"\xff\xfe\x00", b"\x12\x7fab", b"\x0a"])
def test_garbage_is_told_without_a_field(raw: bytes) -> None:
    error = undecodable(pb.GenerateRequest, raw)
    assert (error.field, error.message) == (None, "the message is not a valid headrace.v1.GenerateRequest")
