"""Context and pool limits: the same verdict for stream, non-stream and gRPC, at, below and above every edge."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from headrace.v1 import inference_pb2 as pb

L = 512
COMPLETIONS = "/v1/completions"


async def _verdict_grpc(rig: Any, prompt: list[int], max_tokens: int | None) -> tuple[int, str] | str:
    """(completion tokens, finish) or the name of the status."""
    sampling = pb.SamplingParams(temperature=0, ignore_eos=True)
    if max_tokens is not None:
        sampling.max_tokens = max_tokens
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling=sampling)
    try:
        events = [event async for event in rig.stub.Generate(request)]
    except grpc.aio.AioRpcError as error:
        return error.code().name
    end = events[-1].finished
    return end.completion_tokens, pb.FinishReason.Name(end.reason).removeprefix("FINISH_REASON_").lower()


EDGES: list[tuple[int, int | None, int | None]] = [
    (L - 1, 1, 1),
    (L - 10, None, 10),
    (1, L - 1, L - 1),
    (L - 1, 2, None),
    (L, 1, None),
    (L, 0, None),
    (L + 1, 1, None),
    (L + 1, None, None),
    (4 * L, 1, None),
    (10, L, None),
    (10, 1_000_000, None),
    (10, -1, None),
]
"""(prompt tokens, max_tokens or missing, completion tokens or refused)"""


async def test_the_context_edge(rig: Any) -> None:
    for prompt, max_tokens, tokens in EDGES:
        await _assert_same_verdict(rig, prompt, max_tokens, tokens)
    await rig.idle()


async def _assert_same_verdict(rig: Any, prompt: int, max_tokens: int | None, tokens: int | None) -> None:
    ids = [97] * prompt
    body: dict[str, object] = {"prompt": ids, "temperature": 0, "ignore_eos": True}
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    whole = await rig.post(COMPLETIONS, **body)
    streamed = await rig.post(COMPLETIONS, stream=True, stream_options={"include_usage": True}, **body)
    called = await _verdict_grpc(rig, ids, max_tokens)
    if tokens is None:
        assert whole.status_code == streamed.status_code == 400
        assert whole.json() == streamed.json()
        assert called == "INVALID_ARGUMENT"
        if prompt + max(max_tokens or 0, 0) > L:
            message = whole.json()["error"]["message"]
            assert str(L) in message
            assert str(prompt) in message
            assert whole.json()["error"]["code"] == "context_length_exceeded"
    else:
        assert whole.json()["usage"]["completion_tokens"] == tokens
        assert whole.json()["choices"][0]["finish_reason"] == "length"
        assert f'"completion_tokens":{tokens}' in streamed.text
        assert called == (tokens, "length")


async def test_what_can_never_fit_the_pool_is_refused_at_once_and_others_run(rig: Any) -> None:
    rig.reciter.total_blocks = 16  # 256 tokens
    rig.reciter.hold()
    rig.reciter.go_on()
    while (await rig.store.board())[0].load.total_blocks != 16:
        await rig.store.deliveries("nobody", "0", 20)
    await asyncio.sleep(0.06)  # the router's view of the board is at most this old
    never = await rig.post(COMPLETIONS, prompt=[97] * 300, max_tokens=4)
    long = [await rig.post(COMPLETIONS, prompt=[97] * 200, max_tokens=200) for _ in range(2)]
    short = await asyncio.gather(*(rig.post(COMPLETIONS, prompt="Hello", max_tokens=8) for _ in range(5)))
    for refused in (never, *long):
        assert refused.status_code == 400
        assert "256" in refused.json()["error"]["message"]
    assert [answer.status_code for answer in short] == [200] * 5
    assert await _verdict_grpc(rig, [97] * 300, 4) == "INVALID_ARGUMENT"
    assert (await rig.post(COMPLETIONS, prompt=[97] * 200)).json()["usage"]["completion_tokens"] == 56
    await rig.idle()


async def test_zero_tokens_are_for_scoring_an_echoed_prompt(rig: Any) -> None:
    asked = {"prompt": "Your answer: Yes", "temperature": 0}
    scored = (await rig.post(COMPLETIONS, **asked, max_tokens=0, echo=True, logprobs=1)).json()
    assert (scored["choices"][0]["text"], scored["usage"]["completion_tokens"]) == (asked["prompt"], 0)
    assert len(scored["choices"][0]["logprobs"]["tokens"]) == scored["usage"]["prompt_tokens"]
    for extra in ({}, {"logprobs": 1}, {"echo": False}):
        refused = await rig.post(COMPLETIONS, **asked, max_tokens=0, **extra)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")
    whole = await rig.post(COMPLETIONS, prompt=[97] * L, max_tokens=0, echo=True)
    assert whole.json()["error"]["code"] == "context_length_exceeded", "the token that is not shown needs its place too"
    assert (await rig.post(COMPLETIONS, **asked, max_tokens=4)).status_code == 200


async def test_text_that_could_never_fit_is_refused_without_being_tokenised(rig: Any) -> None:
    response = await rig.post(COMPLETIONS, prompt="x" * (7 << 20), max_tokens=1)
    assert response.status_code == 400
    assert "could ever hold" in response.json()["error"]["message"]
