"""Several choices of one prompt: their indexes, texts, ends and counts, over every protocol and with every client."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import openai
import pytest

from headrace.v1 import inference_pb2 as pb

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROMPT = "ab.cdef.ghi"
DOT = sorted(__import__("tokenizers").pre_tokenizers.ByteLevel.alphabet()).index(".")


def rotated(answer: Sequence[int], choice: int) -> Sequence[int]:
    """Each choice says something of its own, and reaches its first full stop at a time of its own."""
    return answer[choice:]


@pytest.fixture
def choices(rig: Any) -> Any:
    rig.reciter.variant = rotated
    return rig


async def _whole(rig: Any, **asked: object) -> dict[int, tuple[str, str]]:
    body = (await rig.post(COMPLETIONS, prompt=PROMPT, temperature=0, **asked)).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(len(body["choices"])))
    return {choice["index"]: (choice["text"], choice["finish_reason"]) for choice in body["choices"]}


async def test_streams_and_whole_answers_agree_for_each_choice(choices: Any) -> None:
    texts = PROMPT * 3
    expected = {i: (texts[i : i + 12], "length") for i in range(4)}
    assert await _whole(choices, n=4, max_tokens=12) == expected

    chunks = await choices.events(COMPLETIONS, prompt=PROMPT, temperature=0, n=4, max_tokens=12)
    pieces: dict[int, str] = defaultdict(str)
    ends: dict[int, list[str]] = defaultdict(list)
    for chunk in chunks:
        [choice] = chunk["choices"]
        assert not ends[choice["index"]], "nothing comes after a choice's end"
        pieces[choice["index"]] += choice["text"]
        ends[choice["index"]] += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert {i: (pieces[i], *ends[i]) for i in sorted(ends)} == expected


async def test_choices_end_each_at_its_own_time(choices: Any) -> None:
    """The others go on when the first has ended."""
    ended = await _whole(choices, n=4, max_tokens=12, stop=["."])
    assert ended == {0: ("ab", "stop"), 1: ("b", "stop"), 2: ("", "stop"), 3: ("cdef", "stop")}


async def test_usage_counts_the_prompt_once_and_every_choice(choices: Any) -> None:
    asked = {"prompt": PROMPT, "temperature": 0, "n": 4, "max_tokens": 12, "stop": ["."]}
    usage = (await choices.post(COMPLETIONS, **asked)).json()["usage"]
    assert usage == {"prompt_tokens": 11, "completion_tokens": 3 + 2 + 1 + 5, "total_tokens": 22}
    chunks = await choices.events(COMPLETIONS, **asked, stream_options={"include_usage": True})
    assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], usage)


async def test_the_openai_client_streams_several_chat_choices(choices: Any) -> None:
    async with openai.AsyncOpenAI(base_url=f"{choices.base_url}/v1", api_key="none") as client:
        asked = {
            "model": "reciter", "messages": [{"role": "user", "content": "Hello"}], "n": 3, "max_completion_tokens": 9,
            "temperature": 0,
        }  # fmt: skip
        whole = await client.chat.completions.create(**asked)
        stream = await client.chat.completions.create(**asked, stream=True)
        texts: dict[int, str] = defaultdict(str)
        roles: dict[int, list[str]] = defaultdict(list)
        async for chunk in stream:
            [choice] = chunk.choices
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index] += [choice.delta.role] if choice.delta.role else []
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert len(set(texts.values())) == 3
    assert roles == {i: ["assistant"] for i in range(3)}, "each choice says once whose turn it is"


async def test_plain_stubs_get_an_end_for_each_choice(choices: Any) -> None:
    request = pb.GenerateRequest(text=PROMPT, sampling=pb.SamplingParams(max_tokens=12, stop=["."]), n=4)
    events = [event async for event in choices.stub.Generate(request)]
    ends = {e.finished.choice: e.finished.completion_tokens for e in events if e.HasField("finished")}
    assert ends == {0: 3, 1: 2, 2: 1, 3: 5}
    tokens: dict[int, list[int]] = defaultdict(list)
    for event in events:
        if event.HasField("delta"):
            assert event.delta.first_index == len(tokens[event.delta.choice])
            tokens[event.delta.choice] += event.delta.token_ids
    assert {choice: ids[-1] for choice, ids in tokens.items()} == dict.fromkeys(range(4), DOT)


async def test_best_of_shows_the_likeliest_of_what_was_computed(choices: Any) -> None:
    """To the reciter the smallest id is the likeliest, and the last choice says it."""
    choices.reciter.variant = lambda answer, choice: [answer[2 - choice]] * 20
    asked = {"prompt": "abc", "temperature": 0, "max_tokens": 4, "n": 2, "best_of": 3}
    body = (await choices.post(COMPLETIONS, **asked)).json()
    assert [(c["index"], c["text"], c["logprobs"]) for c in body["choices"]] == [(0, "aaaa", None), (1, "bbbb", None)]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 12, "total_tokens": 15}, "all three count"
    body = (await choices.post(COMPLETIONS, **asked, logprobs=0)).json()
    assert [c["logprobs"]["tokens"] for c in body["choices"]] == [["a"] * 4, ["b"] * 4]

    request = pb.GenerateRequest(text="abc", sampling=pb.SamplingParams(max_tokens=4), n=1, best_of=3)
    events = [event async for event in choices.stub.Generate(request)]
    assert [event.WhichOneof("event") for event in events] == ["accepted", "delta", "finished"]
    assert (events[1].delta.text, len(events[1].delta.logprobs)) == ("aaaa", 0)
    refused = await choices.post(COMPLETIONS, **asked, stream=True)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "best_of")
    await choices.idle()


async def test_priority_reaches_the_queue_as_its_band(rig: Any) -> None:
    assert (await rig.post(COMPLETIONS, prompt="a", max_tokens=1, priority=5)).status_code == 200
    [event async for event in rig.stub.Generate(pb.GenerateRequest(text="a", priority=7, sampling={"max_tokens": 1}))]
    assert [request.band for request in rig.reciter.requests] == [5, 7]


async def test_a_client_that_goes_ends_all_its_choices(choices: Any) -> None:
    choices.reciter.hold(after=2)
    request = pb.GenerateRequest(text=PROMPT, sampling=pb.SamplingParams(max_tokens=200, temperature=0), n=4)
    call = choices.stub.Generate(request)
    accepted = await call.read()
    await call.read()
    call.cancel()
    request_id = accepted.accepted.request_id
    await choices.until(lambda: request_id in choices.reciter.cancelled_at)
    choices.reciter.go_on()
    await choices.idle()
    status = await choices.store.status(request_id)
    assert status.finishes == ("cancelled",) * 4
