"""Submit → store → worker → frames → events, over every protocol: the same answer, and nothing left behind."""

from __future__ import annotations

from typing import Any

import openai

from headrace.aio import AsyncClient
from headrace.events import Accepted, Delta, Finished
from headrace.frame import FinishReason
from headrace.sampling import SamplingParams
from headrace.v1 import inference_pb2 as pb
from router.admission.call import Call, TextPrompt

PROMPT = "The turbine turns. "


async def test_a_submitted_call_becomes_accepted_deltas_and_one_finish(rig: Any) -> None:
    call = Call("", TextPrompt(PROMPT), SamplingParams(max_tokens=25, temperature=0.0))
    async with await rig.service.submit(call) as stream:
        events = [event async for event in stream]
    assert events[0] == Accepted(stream.request_id, len(PROMPT))
    deltas = [event for event in events if isinstance(event, Delta)]
    assert [d.first_index for d in deltas] == [sum(len(b.token_ids) for b in deltas[:i]) for i in range(len(deltas))]
    assert "".join(d.text for d in deltas) == (PROMPT * 2)[:25]
    assert events[-1] == Finished(0, FinishReason.LENGTH, len(PROMPT), 25)
    await rig.idle()


async def test_http_grpc_and_both_clients_give_the_same_answer(rig: Any) -> None:
    expected = (PROMPT * 2)[:30]
    asked = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0}
    whole = (await rig.post("/v1/completions", **asked)).json()
    assert whole["choices"][0]["text"] == expected
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"] == {"prompt_tokens": 19, "completion_tokens": 30, "total_tokens": 49}

    chunks = await rig.events("/v1/completions", **asked)
    assert "".join(c["choices"][0]["text"] for c in chunks) == expected
    assert [c["choices"][0]["finish_reason"] for c in chunks][-1] == "length"
    assert {c["id"] for c in chunks} == {chunks[0]["id"]}

    request = pb.GenerateRequest(text=PROMPT, sampling=pb.SamplingParams(max_tokens=30, temperature=0))
    events = [event async for event in rig.stub.Generate(request)]
    assert events[0].accepted.prompt_tokens == 19
    assert "".join(e.delta.text for e in events if e.HasField("delta")) == expected
    assert events[-1].finished == pb.Finished(reason=pb.FINISH_REASON_LENGTH, prompt_tokens=19, completion_tokens=30)

    async with AsyncClient(rig.grpc_address) as client:
        assert "".join([d.text async for d in client.generate(PROMPT, max_tokens=30, temperature=0)]) == expected

    async with openai.AsyncOpenAI(base_url=f"{rig.base_url}/v1", api_key="none") as client:
        stream = await client.completions.create(
            model="reciter", prompt=PROMPT, max_tokens=30, temperature=0, stream=True
        )
        assert "".join([chunk.choices[0].text async for chunk in stream]) == expected
        models = await client.models.list()
        assert [model.id for model in models.data] == ["reciter"]
    await rig.idle()


async def test_chat_is_the_same_over_every_protocol(rig: Any) -> None:
    messages = [{"role": "user", "content": "Hello there"}]
    rendered = ["<|start|>", *"user\nHello there", "<|end|>", "\n", "<|start|>", *"assistant\n"]
    whole = (await rig.post("/v1/chat/completions", messages=messages, max_tokens=21, temperature=0)).json()
    message = whole["choices"][0]["message"]
    assert message["role"] == "assistant"
    assert message["content"] == "user\nHello there"
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"]["prompt_tokens"] == len(rendered)

    async with openai.AsyncOpenAI(base_url=f"{rig.base_url}/v1", api_key="none") as client:
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                model="reciter",
                messages=messages,  # type: ignore[arg-type]
                max_completion_tokens=21,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
        ]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == message["content"]
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.model_dump(exclude_none=True) == whole["usage"]

    request = pb.ChatRequest(
        messages=[pb.ChatMessage(role="user", content="Hello there")],
        sampling=pb.SamplingParams(max_tokens=21, temperature=0),
    )
    events = [event async for event in rig.stub.Chat(request)]
    assert "".join(e.delta.text for e in events if e.HasField("delta")) == message["content"]
    await rig.idle()


async def test_sse_ids_name_request_choice_and_token_index(rig: Any) -> None:
    response = await rig.post("/v1/completions", prompt=PROMPT, max_tokens=8, temperature=0, stream=True)
    ids = [line[4:] for line in response.text.split("\n") if line.startswith("id: ")]
    request_id = ids[0].rsplit(":", 2)[0]
    indices = [int(one.rsplit(":", 1)[1]) for one in ids]
    assert all(one.startswith(f"{request_id}:0:") for one in ids)
    assert indices == sorted(indices)
    assert indices[-1] == 7
