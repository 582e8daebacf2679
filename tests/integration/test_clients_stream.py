"""The official OpenAI client and a plain grpcio client, as their users would use them, against real parts."""

from __future__ import annotations

import json

import grpc
import httpx
import pytest
from openai import OpenAI

from headrace import AsyncClient, Client
from headrace.v1 import inference_pb2 as pb
from headrace.v1.inference_pb2_grpc import InferenceStub

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

MODEL = "SmolLM2-135M-Instruct"
ALPHABET = "Here is the English alphabet: ABC"


def openai_client(cluster) -> OpenAI:
    return OpenAI(base_url=f"{cluster.base_url}/v1", api_key="none", max_retries=0, timeout=60)


def test_openai_chat_streams_and_counts(running_cluster) -> None:
    client = openai_client(running_cluster)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Count to five."}],
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert text
    usage = chunks[-1].usage
    assert usage is not None
    assert 0 < usage.completion_tokens <= 24
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    finishes = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert finishes in (["stop"], ["length"])
    assert len([c for c in chunks if c.choices and c.choices[0].delta.content]) > 3, "tokens came one by one"


def test_openai_completion_and_models(running_cluster) -> None:
    client = openai_client(running_cluster)
    assert [m.id for m in client.models.list()] == [MODEL]
    done = client.completions.create(model=MODEL, prompt=ALPHABET, max_tokens=8, temperature=0)
    assert done.choices[0].text.startswith("DEFGHIJK")
    assert done.choices[0].finish_reason == "length"
    assert done.usage is not None
    assert done.usage.completion_tokens == 8


def test_plain_grpc_stubs_stream(running_cluster) -> None:
    request = pb.GenerateRequest(text=ALPHABET, sampling=pb.SamplingParams(max_tokens=8, temperature=0))
    with grpc.insecure_channel(running_cluster.grpc_address) as channel:
        events = list(InferenceStub(channel).Generate(request, timeout=60))
    kinds = [e.WhichOneof("event") for e in events]
    assert kinds[0] == "accepted"
    assert kinds[-1] == "finished"
    deltas = [e.delta for e in events if e.WhichOneof("event") == "delta"]
    assert [i for d in deltas for i in range(d.first_index, d.first_index + len(d.token_ids))] == list(range(8))
    assert "".join(d.text for d in deltas).startswith("DEFGHIJK")
    assert events[-1].finished.reason == pb.FINISH_REASON_LENGTH
    assert events[-1].finished.completion_tokens == 8


def test_health_and_reflection_answer_a_grpc_only_probe(running_cluster) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

    with grpc.insecure_channel(running_cluster.grpc_address) as channel:
        for service in ("", "headrace.v1.Inference"):
            reply = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=10
            )
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        assert "headrace.v1.Inference" in ProtoReflectionDescriptorDatabase(channel).get_services()


@pytest.mark.parametrize("seed", [None, 7])
async def test_the_same_answer_on_every_way(running_cluster, seed: int | None) -> None:
    """HTTP stream, HTTP non-stream, gRPC sync and asyncio: greedy, and sampled with a seed."""
    params = (
        {"max_tokens": 24, "temperature": 0} if seed is None else {"max_tokens": 24, "temperature": 0.9, "seed": seed}
    )
    body = {"model": MODEL, "prompt": "The three primary colours are", **params}
    async with httpx.AsyncClient(base_url=running_cluster.base_url, timeout=60) as http:
        whole = (await http.post("/v1/completions", json=body)).json()["choices"][0]["text"]
        streamed = []
        async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    streamed.append(json.loads(line[6:])["choices"][0]["text"])
    async with AsyncClient(running_cluster.grpc_address) as client:
        asynchronous = await client.generate(body["prompt"], **params).text()
    with Client(running_cluster.grpc_address) as client:
        synchronous = client.generate(body["prompt"], **params).text()
    assert whole
    assert {"".join(streamed), asynchronous, synchronous} == {whole}


def test_token_ids_are_a_prompt_too(running_cluster) -> None:
    ids = [7334, 2988, 42, 9230]
    with Client(running_cluster.grpc_address) as client:
        by_ids = client.generate(ids, max_tokens=8, temperature=0)
        assert by_ids.accepted.prompt_tokens == 4
        text = by_ids.text()
        assert text == client.generate("Your answer: Yes", max_tokens=8, temperature=0).text()
    http = httpx.post(
        f"{running_cluster.base_url}/v1/completions",
        json={"model": MODEL, "prompt": ids, "max_tokens": 8, "temperature": 0},
        timeout=60,
    )
    assert http.json()["choices"][0]["text"] == text


def test_ignore_eos_and_min_tokens(running_cluster) -> None:
    chat = [{"role": "user", "content": "Say only the word: yes"}]
    with Client(running_cluster.grpc_address) as client:
        to_the_end = client.chat(chat, max_tokens=48, temperature=0, ignore_eos=True)
        to_the_end.text()
        at_least = client.chat(chat, max_tokens=48, min_tokens=40, temperature=0)
        at_least.text()
    assert to_the_end.finished is not None
    assert at_least.finished is not None
    assert (to_the_end.finished.completion_tokens, str(to_the_end.finished.reason)) == (48, "length")
    assert 40 <= at_least.finished.completion_tokens <= 48
