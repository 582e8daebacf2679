"""Log probabilities and echo as clients get them: whole and streamed, HTTP and gRPC, with the official client too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai

from headrace.aio import AsyncClient
from headrace.v1 import inference_pb2 as pb

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LETTERS = sorted(__import__("tokenizers").pre_tokenizers.ByteLevel.alphabet())
HI = [{"role": "user", "content": "hi 😀"}]


def logprob(letter: str) -> float:
    """What the reciter says of a letter (see `scored`)."""
    return -LETTERS.index(letter) / 64


def joined(blocks: Iterator[dict[str, Any]]) -> dict[str, list[Any]]:
    whole: dict[str, list[Any]] = {}
    for block in blocks:
        for name, values in block.items():
            whole.setdefault(name, []).extend(values or [])
    return whole


async def test_completions_tell_tokens_numbers_and_offsets(rig: Any) -> None:
    asked = {"prompt": "aé", "max_tokens": 3, "temperature": 0, "logprobs": 2}
    [choice] = (await rig.post(COMPLETIONS, **asked)).json()["choices"]
    block = choice["logprobs"]
    assert choice["text"] == "aé"
    assert block["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert block["token_logprobs"][0] == logprob("a")
    assert block["text_offset"] == [0, 1, 1]
    assert [len(tops) for tops in block["top_logprobs"]] == [3, 3, 3], "two likeliest and the token itself"
    chunks = await rig.events(COMPLETIONS, **asked)
    told = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert told[-1] is None, "the end has no token of its own"
    assert joined(block for block in told if block) == block


async def test_logprobs_zero_tells_the_tokens_alone(rig: Any) -> None:
    [choice] = (await rig.post(COMPLETIONS, prompt="ab", max_tokens=2, logprobs=0)).json()["choices"]
    assert choice["logprobs"]["top_logprobs"] is None
    assert choice["logprobs"]["token_logprobs"] == [logprob("a"), logprob("b")]


async def test_who_asks_for_none_gets_none(rig: Any) -> None:
    [choice] = (await rig.post(COMPLETIONS, prompt="ab", max_tokens=2)).json()["choices"]
    assert choice["logprobs"] is None
    assert rig.reciter.requests[0].sampling.logprobs is None
    [choice] = (await rig.post(CHAT, messages=HI, max_tokens=2, logprobs=False, top_logprobs=0)).json()["choices"]
    assert choice["logprobs"] is None


async def test_chat_has_an_entry_for_every_token_counted(rig: Any) -> None:
    async with openai.AsyncOpenAI(base_url=f"{rig.base_url}/v1", api_key="none") as client:
        asked: Any = {"model": "reciter", "messages": HI, "max_tokens": 14, "logprobs": True, "top_logprobs": 3}
        whole = await client.chat.completions.create(**asked)
        content = whole.choices[0].logprobs.content
        assert len(content) == whole.usage.completion_tokens == 14
        assert all(len(entry.top_logprobs) == 3 for entry in content)
        text = b"".join(bytes(entry.bytes) for entry in content[1:]).decode()
        assert text == "user\nhi 😀<|end|>"[: len(text)]
        chunks = [chunk async for chunk in await client.chat.completions.create(**asked, stream=True)]
    streamed = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert streamed == content
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content


async def test_tokens_of_a_stop_string_are_counted_and_told_but_not_shown(rig: Any) -> None:
    asked = {"prompt": "abcdef", "max_tokens": 9, "temperature": 0, "logprobs": 0, "stop": ["cde"]}
    body = (await rig.post(COMPLETIONS, **asked)).json()
    [choice] = body["choices"]
    assert (choice["text"], choice["finish_reason"], body["usage"]["completion_tokens"]) == ("ab", "stop", 5)
    assert choice["logprobs"]["tokens"] == list("abcde")
    chunks = await rig.events(COMPLETIONS, **asked)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "ab"
    assert joined(c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"])["tokens"] == list("abcde")


async def test_echo_gives_the_prompt_back_before_every_choice(rig: Any) -> None:
    asked = {"prompt": "ab<|end|>c", "max_tokens": 2, "temperature": 0, "echo": True, "n": 2}
    whole = (await rig.post(COMPLETIONS, **asked)).json()
    assert [choice["text"] for choice in whole["choices"]] == ["ab<|end|>cab"] * 2
    texts = {0: "", 1: ""}
    for chunk in await rig.events(COMPLETIONS, **asked):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == {0: "ab<|end|>cab", 1: "ab<|end|>cab"}
    ids = [LETTERS.index("x"), 256, LETTERS.index("y")]
    [choice] = (await rig.post(COMPLETIONS, prompt=ids, max_tokens=1, echo=True)).json()["choices"]
    assert choice["text"] == "xyx", "ids become their text, in which special tokens do not show"


async def test_echo_with_logprobs_scores_prompt_and_output_in_one_list(rig: Any) -> None:
    asked = {"prompt": "abc", "max_tokens": 2, "temperature": 0, "echo": True, "logprobs": 1}
    [choice] = (await rig.post(COMPLETIONS, **asked)).json()["choices"]
    block = choice["logprobs"]
    assert choice["text"] == "abcab"
    assert block["tokens"] == list("abcab")
    assert block["token_logprobs"] == [None, *map(logprob, "bcab")]
    assert block["top_logprobs"][0] is None
    assert block["text_offset"] == [0, 1, 2, 3, 4]
    assert "prompt_logprobs" not in choice
    chunks = await rig.events(COMPLETIONS, **asked)
    assert chunks[0]["choices"][0]["text"] == "abc", "the prompt comes first, in a chunk of its own"
    assert joined(c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]) == block


async def test_max_tokens_zero_with_echo_scores_a_text_and_writes_nothing(rig: Any) -> None:
    asked = {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 0}
    async with openai.AsyncOpenAI(base_url=f"{rig.base_url}/v1", api_key="none") as client:
        whole = await client.completions.create(model="reciter", **asked)
    [choice] = whole.choices
    assert (choice.text, choice.finish_reason, whole.usage.completion_tokens) == ("abc", "length", 0)
    assert choice.logprobs.token_logprobs == [None, logprob("b"), logprob("c")]
    chunks = await rig.events(COMPLETIONS, **asked, stream_options={"include_usage": True})
    assert [c["choices"][0]["text"] for c in chunks[:-1]] == ["abc", ""]
    assert chunks[-1]["usage"] == whole.usage.model_dump(exclude_none=True)
    refused = await rig.post(COMPLETIONS, prompt="abc", max_tokens=0)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")


async def test_prompt_logprobs_stand_in_a_field_of_their_own(rig: Any) -> None:
    [choice] = (await rig.post(COMPLETIONS, prompt="abc", max_tokens=1, prompt_logprobs=0)).json()["choices"]
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    assert rest[0] == {str(LETTERS.index("b")): {"logprob": logprob("b"), "rank": LETTERS.index("b") + 1,
                                                 "decoded_token": "b"}}  # fmt: skip
    assert len(rest) == 2
    assert choice["logprobs"] is None
    body = (await rig.post(CHAT, messages=HI, max_tokens=1, prompt_logprobs=1)).json()
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]
    refused = await rig.post(COMPLETIONS, prompt="abc", max_tokens=1, prompt_logprobs=1, stream=True)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")


async def test_grpc_streams_the_same_numbers(rig: Any) -> None:
    sampling = pb.SamplingParams(max_tokens=3, temperature=0, logprobs=1, prompt_logprobs=0)
    events = [event async for event in rig.stub.Generate(pb.GenerateRequest(text="abc", sampling=sampling))]
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[:3] == ["accepted", "prompt_logprobs", "delta"]
    prompt = events[1].prompt_logprobs
    assert list(prompt.token_ids) == [LETTERS.index(letter) for letter in "abc"]
    assert [told.HasField("logprob") for told in prompt.logprobs] == [False, True, True]
    told = [one for event in events if event.HasField("delta") for one in event.delta.logprobs]
    assert [one.logprob for one in told] == [logprob(letter) for letter in "abc"]
    assert all(list(one.top_token_ids) == [0] for one in told)
    async with AsyncClient(rig.grpc_address) as client:
        stream = client.generate("abc", max_tokens=3, temperature=0, logprobs=1, prompt_logprobs=0, n=2)
        outputs = await stream.results()
        assert [one.logprob for one in outputs[0].logprobs] == [logprob(letter) for letter in "abc"]
        assert len(outputs[1].logprobs) == len(outputs[1].token_ids) == 3
        assert stream.prompt_logprobs is not None
        assert stream.prompt_logprobs.token_ids == tuple(prompt.token_ids)


MISFITS: list[tuple[str, dict[str, object], str]] = [
    (COMPLETIONS, {"logprobs": 21}, "logprobs"),
    (COMPLETIONS, {"logprobs": -1}, "logprobs"),
    (COMPLETIONS, {"logprobs": True}, "logprobs"),
    (COMPLETIONS, {"logprobs": 1, "top_logprobs": 2}, "top_logprobs"),
    (COMPLETIONS, {"prompt_logprobs": 21}, "prompt_logprobs"),
    (COMPLETIONS, {"prompt_logprobs": "all"}, "prompt_logprobs"),
    (COMPLETIONS, {"echo": 1}, "echo"),
    (CHAT, {"logprobs": 1}, "logprobs"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    (CHAT, {"echo": True}, "echo"),
    (CHAT, {"prompt_logprobs": -1}, "prompt_logprobs"),
]


async def test_what_does_not_fit_is_named(rig: Any) -> None:
    for path, wrong, param in MISFITS:
        prompt = {"prompt": "a"} if path == COMPLETIONS else {"messages": HI}
        response = await rig.post(path, **prompt, max_tokens=1, **wrong)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), (wrong, response.text)
    assert rig.reciter.seen == []
