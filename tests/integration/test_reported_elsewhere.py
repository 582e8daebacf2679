"""What users of other servers reported, tried here against the real model (texts of the embedded model, greedy)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import httpx
import pytest

from headrace import Client
from headrace.errors import InvalidRequest
from headrace.v1 import inference_pb2 as pb
from headrace.v1.inference_pb2_grpc import InferenceStub
from tests.integration.idle import assert_idle

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

MODEL = "SmolLM2-135M-Instruct"
ALPHABET = "Here is the English alphabet: ABC"
FACES = "😀🔥" * 5
CONTEXT = 2048
"""Of the cluster the tests start; the model's own is 8192."""
THE = 260


@pytest.fixture(scope="module")
def http(running_cluster):
    with httpx.Client(base_url=running_cluster.base_url, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def grpc_client(running_cluster):
    with Client(running_cluster.grpc_address) as client:
        yield client


def whole(http: httpx.Client, **body: Any) -> tuple[str, str, int]:
    reply = http.post("/v1/completions", json={"model": MODEL, **body})
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    choice = answer["choices"][0]
    return choice["text"], choice["finish_reason"], answer["usage"]["completion_tokens"]


def streamed(http: httpx.Client, **body: Any) -> tuple[list[str], str, int]:
    deltas: list[str] = []
    finish, tokens = "", 0
    body |= {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}}
    with http.stream("POST", "/v1/completions", json=body) as reply:
        assert reply.status_code == 200
        for line in reply.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                event = json.loads(line[6:])
                for choice in event["choices"]:
                    deltas.append(choice["text"])
                    finish = choice["finish_reason"] or finish
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    return deltas, finish, tokens


def three_ways(http: httpx.Client, grpc_client: Client, prompt: Any, **params: Any) -> tuple[str, str, int, list[str]]:
    """One answer, proven equal over HTTP whole, HTTP stream and gRPC."""
    params = {"temperature": 0, **params}
    text, finish, tokens = whole(http, prompt=prompt, **params)
    deltas, stream_finish, stream_tokens = streamed(http, prompt=prompt, **params)
    assert ("".join(deltas), stream_finish, stream_tokens) == (text, finish, tokens)
    call = grpc_client.generate(prompt, **params)
    assert call.text() == text
    assert call.finished is not None
    assert (str(call.finished.reason), call.finished.completion_tokens) == (finish, tokens)
    return text, finish, tokens, deltas


@pytest.mark.parametrize(("prompt", "expected"), [(FACES, "😀" + "🔥" * 7), ("日本語" * 4, "日本語" * 4)])
def test_characters_of_several_tokens_arrive_whole(http, grpc_client, prompt: str, expected: str) -> None:
    text, finish, tokens, deltas = three_ways(http, grpc_client, prompt, max_tokens=24)
    assert (text, finish, tokens) == (expected, "length", 24)
    assert not any("�" in d for d in deltas)


@pytest.mark.parametrize("max_tokens", range(1, 14))
def test_a_cut_inside_a_character_loses_only_that_character(http, grpc_client, max_tokens: int) -> None:
    text, finish, tokens, _ = three_ways(http, grpc_client, FACES, max_tokens=max_tokens)
    assert (finish, tokens) == ("length", max_tokens)
    assert ("😀" + "🔥" * 7).startswith(text.removesuffix("�"))


@pytest.mark.parametrize(
    ("params", "text", "finish", "tokens"),
    [
        ({"stop": ["DEFGHIJ"]}, "", "stop", 4),
        ({"stop": ["DEFGHIJ"], "include_stop_str_in_output": True}, "DEFGHIJ", "stop", 4),
        ({"stop": ["HI", "FGHIJK"]}, "DEFG", "stop", 3),
        ({"stop": ["DEFGHIJ"], "max_tokens": 2}, "DEFGH", "length", 2),
    ],
)
def test_stop_strings_across_token_borders(http, grpc_client, params, text: str, finish: str, tokens: int) -> None:
    got, why, count, deltas = three_ways(http, grpc_client, ALPHABET, **{"max_tokens": 32, **params})
    assert (got, why, count) == (text, finish, tokens)
    assert text == "DEFGHIJ" or not any(set(d) & set("DEFGHIJ") - set(text) for d in deltas), "no piece of it leaked"


def test_near_misses_of_a_stop_string_are_released(http, grpc_client) -> None:
    text, _, _, _ = three_ways(http, grpc_client, ALPHABET, max_tokens=32, stop=["GHX", "FGHIK"])
    assert text.startswith("DEFGHIJKLMNOPQRSTUVWXYZ")


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens"),
    [
        (CONTEXT - 1, 2),
        (CONTEXT, 1),
        (CONTEXT + 1, 1),
        (4 * CONTEXT, 1),
        (10, CONTEXT),
        (10, 1_000_000),
        (10, -1),
        (10, 0),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_lengths_that_cannot_fit_are_refused_before_any_stream(
    http, grpc_client, prompt_tokens: int, max_tokens: int, stream: bool
) -> None:
    prompt = [THE] * prompt_tokens
    reply = http.post(
        "/v1/completions", json={"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "stream": stream}
    )
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] in ("max_tokens", "prompt")
    if max_tokens > 0:
        assert str(CONTEXT) in error["message"]
    with pytest.raises(InvalidRequest) as refused:
        grpc_client.generate(prompt, max_tokens=max_tokens).text()
    assert refused.value.field in ("max_tokens", "prompt", "sampling.max_tokens")


def test_the_longest_prompt_runs_and_an_absent_limit_is_clamped(http, grpc_client) -> None:
    """One token of room at the very end of the context; then ten tokens of room and no limit given."""
    text, finish, tokens = whole(http, prompt=[THE] * (CONTEXT - 1), max_tokens=1, temperature=0)
    assert (finish, tokens) == ("length", 1)
    assert text
    call = grpc_client.generate([THE] * (CONTEXT - 10), temperature=0, ignore_eos=True)
    call.text()
    assert call.finished is not None
    assert (str(call.finished.reason), call.finished.completion_tokens) == ("length", 10)


async def test_equal_client_request_ids_do_not_mix_streams_nor_cancels(running_cluster) -> None:
    """Twelve streams under one id, over HTTP and gRPC; every fourth is cancelled, the others are as they are alone."""

    def prompt(k: int) -> str:
        return f"Repeat the number {1000 + k}: {1000 + k} {1000 + k} {1000 + k}"

    async def over_http(http: httpx.AsyncClient, k: int, *, alone: bool) -> str:
        text, headers = "", {} if alone else {"X-Request-Id": "same"}
        body = {"model": MODEL, "prompt": prompt(k), "max_tokens": 12, "temperature": 0, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body, headers=headers) as reply:
            assert reply.status_code == 200
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
                    if is_cancelled(k) and not alone:
                        break
        return text

    async def over_grpc(stub: InferenceStub, k: int, *, alone: bool) -> str:
        sampling = pb.SamplingParams(max_tokens=12, temperature=0)
        metadata = () if alone else (("x-request-id", "same"),)
        call = stub.Generate(pb.GenerateRequest(text=prompt(k), sampling=sampling), metadata=metadata)
        text = ""
        async for event in call:
            text += event.delta.text
            if event.HasField("delta") and is_cancelled(k) and not alone:
                call.cancel()
                break
        return text

    def is_cancelled(k: int) -> bool:
        return k % 4 == 3

    async with (
        httpx.AsyncClient(base_url=running_cluster.base_url, timeout=60) as http,
        grpc.aio.insecure_channel(running_cluster.grpc_address) as channel,
    ):
        stub = InferenceStub(channel)

        async def one(k: int, *, alone: bool) -> str:
            # By eights, so that of the cancelled ones some are HTTP's and some gRPC's.
            return await (over_http(http, k, alone=alone) if k % 8 < 4 else over_grpc(stub, k, alone=alone))

        together = await asyncio.gather(*(one(k, alone=False) for k in range(12)))
        survivors = [k for k in range(12) if not is_cancelled(k)]
        assert [together[k] for k in survivors] == [await one(k, alone=True) for k in survivors]
    assert len({together[k] for k in survivors}) == len(survivors), "each prompt has an answer of its own"
    assert_idle(running_cluster)


@pytest.mark.parametrize(
    ("messages", "prompt_tokens"),
    [
        ([{"role": "user", "content": [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]}], 32),
        ([{"role": "user", "content": "Hello there"}], 32),
        ([{"role": "user", "content": ""}], 30),
        ([{"role": "user", "content": "What is the capital of France?"}], 37),
    ],
)
def test_message_shapes_count_their_tokens(http, messages: list[dict], prompt_tokens: int) -> None:
    reply = http.post("/v1/chat/completions", json={"model": MODEL, "messages": messages, "max_tokens": 4})
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["prompt_tokens"] == prompt_tokens


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"content": "hi"}], "messages[0].role"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
            "messages[0].content[0]",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]"),
        ("hi", "messages"),
        ([1, 2], "messages[0]"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_wrong_messages_are_named(http, messages, field: str, stream: bool) -> None:
    reply = http.post(
        "/v1/chat/completions", json={"model": MODEL, "messages": messages, "max_tokens": 4, "stream": stream}
    )
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"].startswith(field)


def test_the_cluster_is_alive_after_all_of_it(http) -> None:
    assert whole(http, prompt="Hello", max_tokens=4, temperature=0)[2] == 4
    assert http.get("/healthz").status_code == 200
    assert http.get("/readyz").status_code == 200
    metrics = http.get("/metrics").text
    assert "headrace" in metrics
    assert not [
        line for line in metrics.splitlines() if not line.startswith("#") and line.rsplit(" ", 1)[-1].startswith("-")
    ]
