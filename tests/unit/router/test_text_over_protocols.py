"""Characters of several tokens, stop strings and message shapes: stream, non-stream and gRPC say the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from headrace.v1 import inference_pb2 as pb

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ALPHABET = "DEFGHIJKLMNOPQRSTUVWXYZ"


async def _three_ways(rig: Any, prompt: str, **sampling: object) -> tuple[str, str, int, list[str]]:
    """(text, finish, completion tokens, the stream's pieces), after checking that all three ways agree."""
    whole = (await rig.post(COMPLETIONS, prompt=prompt, temperature=0, **sampling)).json()
    text, finish = whole["choices"][0]["text"], whole["choices"][0]["finish_reason"]
    tokens = whole["usage"]["completion_tokens"]
    options = {"include_usage": True}
    chunks = await rig.events(COMPLETIONS, prompt=prompt, temperature=0, stream_options=options, **sampling)
    pieces = [chunk["choices"][0]["text"] for chunk in chunks[:-1]]
    assert "".join(pieces) == text
    assert chunks[-2]["choices"][0]["finish_reason"] == finish
    assert chunks[-1]["usage"]["completion_tokens"] == tokens
    request = pb.GenerateRequest(text=prompt, sampling=pb.SamplingParams(temperature=0, **sampling))
    events = [event async for event in rig.stub.Generate(request)]
    assert "".join(event.delta.text for event in events if event.HasField("delta")) == text
    assert events[-1].finished.completion_tokens == tokens
    return text, finish, tokens, pieces


async def test_characters_of_several_tokens_come_whole(rig: Any) -> None:
    for prompt in ("😀🔥" * 5, "日本語" * 4, "naïve café", "👩‍👩‍👧‍👦!"):
        length = len(prompt.encode())
        text, finish, tokens, pieces = await _three_ways(rig, prompt, max_tokens=length)
        assert (text, finish, tokens) == (prompt, "length", length)
        assert not any("�" in piece for piece in pieces)


async def test_a_cut_inside_a_character_drops_only_that_character(rig: Any) -> None:
    prompt = "😀🔥" * 3
    for cut in range(1, 14):
        text, finish, tokens, _ = await _three_ways(rig, prompt, max_tokens=cut)
        assert text == prompt.encode()[:cut].decode("utf-8", "ignore")
        assert (finish, tokens) == ("length", cut)


def _alphabet(_: Sequence[int]) -> Sequence[int]:
    """Goes on from ABC to Z, then the end-of-sequence token. Ids are places in the byte alphabet's order."""
    return [*map(LETTERS.index, ALPHABET), 257]


LETTERS = sorted(__import__("tokenizers").pre_tokenizers.ByteLevel.alphabet())


@pytest.mark.parametrize(
    ("sampling", "text", "finish", "tokens"),
    [
        ({"stop": ["DEFGHIJ"], "max_tokens": 32}, "", "stop", 7),
        ({"stop": ["DEFGHIJ"], "max_tokens": 32, "include_stop_str_in_output": True}, "DEFGHIJ", "stop", 7),
        ({"stop": ["GHX", "FGHIK"], "max_tokens": 32}, ALPHABET, "stop", 24),
        ({"stop": ["HI", "FGHIJK"], "max_tokens": 32}, "DEFG", "stop", 6),
        ({"stop": ["DEFGHIJ"], "max_tokens": 5}, "DEFGH", "length", 5),
        ({"stop": ["Z"], "max_tokens": 32}, ALPHABET[:-1], "stop", 23),
        ({"stop": ["DEF"], "min_tokens": 4, "max_tokens": 6}, "DEFGHI", "length", 6),
        ({"stop_token_ids": [LETTERS.index("F")], "max_tokens": 32}, "DE", "stop", 3),
    ],
)
async def test_stop_strings_that_span_tokens(
    rig: Any, sampling: dict[str, object], text: str, finish: str, tokens: int
) -> None:
    rig.reciter.script = _alphabet
    got_text, got_finish, got_tokens, pieces = await _three_ways(rig, "Here is the English alphabet: ABC", **sampling)
    assert (got_text, got_finish, got_tokens) == (text, finish, tokens)
    if text == "":
        assert "".join(pieces) == ""


UNRENDERABLE: list[tuple[list[object], str]] = [
    ([], "messages"),
    ([{"role": "user"}], "messages[0].content"),
    ([{"role": "user", "content": None}], "messages[0].content"),
    ([{"content": "hi"}], "messages[0].role"),
    ([{"role": "user", "content": []}], "messages[0].content"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    (
        [
            {"role": "user", "content": "look"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]},
        ],
        "messages[1].content[1].type",
    ),
]


async def test_message_shapes_that_cannot_be_rendered_name_the_place(rig: Any) -> None:
    for messages, param in UNRENDERABLE:
        for stream in (False, True):
            response = await rig.post(CHAT, messages=messages, max_tokens=4, stream=stream)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == param


async def test_message_shapes_that_mean_the_same_cost_the_same(rig: Any) -> None:
    async def prompt_tokens(messages: list[object]) -> int:
        response = await rig.post(CHAT, messages=messages, max_tokens=1)
        assert response.status_code == 200, response.text
        return int(response.json()["usage"]["prompt_tokens"])

    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]
    plain = await prompt_tokens([{"role": "user", "content": "Hello there"}])
    assert await prompt_tokens([{"role": "user", "content": parts}]) == plain
    assert await prompt_tokens([{"role": "user", "content": ""}]) == plain - len("Hello there")
    user = {"role": "user", "content": "a"}
    late = await prompt_tokens([user, {"role": "system", "content": "b"}])
    assert late > await prompt_tokens([user])
    assert await prompt_tokens([{"role": "martian", "content": "hi"}]) > 0
    assert await prompt_tokens([{"role": "assistant", "content": None, "tool_calls": []}, user]) > 0


async def test_grpc_judges_messages_as_http_does(rig: Any) -> None:
    import grpc

    request = pb.ChatRequest(messages=[pb.ChatMessage(role="user")])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [event async for event in rig.stub.Chat(request)]
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert ("headrace-field", "messages[0].content") in tuple(caught.value.trailing_metadata())
