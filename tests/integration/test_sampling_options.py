"""Several choices, penalties, biases and log probabilities of the real model, by the official client and by ours."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest
from openai import OpenAI

from headrace import Client, Output
from tests.integration.idle import assert_idle

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

MODEL = "SmolLM2-135M-Instruct"
ALPHABET = "Here is the English alphabet: ABC"
WORD = "Write one word:"
REPETITIVE = "日本語日本語日本語日本語"
CLOSE = 2e-3
"""Log probabilities of one token in passes of different shapes, in float32."""


@pytest.fixture(scope="module")
def openai_client(running_cluster) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{running_cluster.base_url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def client(running_cluster) -> Iterator[Client]:
    with Client(running_cluster.grpc_address) as client:
        yield client


def ids(client: Client, prompt: str, **options: Any) -> tuple[int, ...]:
    [output] = client.generate(prompt, temperature=0, **options).results()
    return output.token_ids


def likelihood(output: Output) -> float:
    return math.fsum(one.logprob for one in output.logprobs)


@pytest.mark.parametrize("stop", [None, ["."]])
def test_choices_are_the_same_streamed_and_whole_and_again(openai_client, client, stop: list[str] | None) -> None:
    asked: dict[str, Any] = {
        "model": MODEL, "prompt": WORD, "max_tokens": 40, "temperature": 1.2, "n": 4, "seed": 7, "stop": stop,
    }  # fmt: skip
    first, second = (openai_client.completions.create(**asked) for _ in range(2))
    texts: dict[int, str] = defaultdict(str)
    finishes: dict[int, str] = {}
    for chunk in openai_client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            assert choice.index not in finishes, "nothing comes after a choice's end"
            texts[choice.index] += choice.text
            if choice.finish_reason:
                finishes[choice.index] = choice.finish_reason
    whole = {choice.index: choice.text for choice in first.choices}
    assert sorted(whole) == sorted(finishes) == [0, 1, 2, 3]
    assert whole == texts == {choice.index: choice.text for choice in second.choices}
    assert finishes == {choice.index: choice.finish_reason for choice in first.choices}
    assert len(set(whole.values())) >= 2
    outputs = client.generate(WORD, max_tokens=40, temperature=1.2, n=4, seed=7, stop=stop).results()
    assert [output.text for output in outputs] == [whole[i] for i in range(4)]
    assert first.usage is not None
    assert first.usage.completion_tokens == sum(len(output.token_ids) for output in outputs)
    [alone] = client.generate(WORD, max_tokens=40, temperature=1.2, seed=7, stop=stop).results()
    assert alone.token_ids == outputs[0].token_ids, "a choice does not depend on its siblings"
    assert first.usage.prompt_tokens == alone.finished.prompt_tokens, "the prompt counts once"


def test_greedy_choices_are_equal(client) -> None:
    outputs = client.generate(ALPHABET, max_tokens=8, temperature=0, n=4).results()
    assert {output.text for output in outputs} == {outputs[0].text}
    assert outputs[0].text.startswith("DEFGHIJK")


def test_a_client_that_goes_leaves_nothing_of_its_choices(running_cluster) -> None:
    body = {"model": MODEL, "prompt": WORD, "max_tokens": 400, "n": 4, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{running_cluster.base_url}/v1/completions", json=body, timeout=60) as reply:
        lines = (line for line in reply.iter_lines() if line.startswith("data: "))
        assert [next(lines) for _ in range(5)]
    assert_idle(running_cluster)


def test_best_of_shows_the_likeliest_of_the_same_choices(openai_client, client) -> None:
    asked: dict[str, Any] = {"max_tokens": 24, "temperature": 1.2, "seed": 11}
    outputs = client.generate(WORD, n=5, logprobs=0, **asked).results()
    ranked = sorted(outputs, key=likelihood, reverse=True)
    best = openai_client.completions.create(model=MODEL, prompt=WORD, n=2, best_of=5, **asked)
    assert [choice.text for choice in best.choices] == [output.text for output in ranked[:2]]
    assert best.usage.completion_tokens == sum(len(output.token_ids) for output in outputs)
    shown = client.generate(WORD, n=2, best_of=5, **asked).results()
    assert [output.token_ids for output in shown] == [output.token_ids for output in ranked[:2]]
    assert shown[0].logprobs == (), "they were measured to rank, not asked for"


def test_penalties_see_what_they_are_meant_to_see(client) -> None:
    """The reference is transformers in float32: presence and frequency look at the output, repetition at both."""
    plain = ids(client, REPETITIVE, max_tokens=8)
    assert plain == (23274, 115, 40993, 179, 120, 248, 23274, 115)
    penalised = ids(client, REPETITIVE, max_tokens=8, presence_penalty=2.0, frequency_penalty=2.0)
    assert penalised == (23274, 115, 40993, 179, 120, 248, 8083, 219)
    assert ids(client, REPETITIVE, max_tokens=8, repetition_penalty=1.3)[0] == 8083
    assert ids(client, REPETITIVE, max_tokens=8) == plain, "nothing of it stays for the next"


def test_a_bias_bans_and_forces(openai_client, client) -> None:
    first = ids(client, ALPHABET, max_tokens=1)[0]
    assert ids(client, ALPHABET, max_tokens=1, logit_bias={first: -100})[0] != first
    forced = openai_client.completions.create(
        model=MODEL, prompt=ALPHABET, max_tokens=4, temperature=0, logit_bias={"260": 100}
    )
    assert forced.choices[0].text == " the" * 4


def test_log_probabilities_are_of_the_tokens_and_equal_over_both_protocols(openai_client, client) -> None:
    [output] = client.generate(ALPHABET, max_tokens=6, temperature=0, logprobs=3).results()
    assert [one.rank for one in output.logprobs] == [1] * 6, "greedy takes the likeliest"
    assert all(one.top[0] == (token, one.logprob) for token, one in zip(output.token_ids, output.logprobs, strict=True))
    assert all(sum(math.exp(logprob) for _, logprob in one.top) <= 1 + 1e-6 for one in output.logprobs)
    [choice] = openai_client.completions.create(
        model=MODEL, prompt=ALPHABET, max_tokens=6, temperature=0, logprobs=3
    ).choices
    assert "".join(choice.logprobs.tokens) == choice.text == output.text
    assert choice.logprobs.token_logprobs == pytest.approx([one.logprob for one in output.logprobs], abs=CLOSE)
    starts = [*choice.logprobs.text_offset, len(choice.text)]
    assert [choice.text[a:b] for a, b in pairwise(starts)] == choice.logprobs.tokens


def test_chat_bytes_put_characters_of_several_tokens_together(openai_client) -> None:
    [choice] = openai_client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Repeat this and nothing else: 😀🔥😀🔥"}],
        max_tokens=24,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    ).choices
    raw = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content)
    assert raw.decode("utf-8", "ignore").startswith(choice.message.content)


def test_a_text_scored_is_as_likely_as_it_was_when_written(openai_client, client) -> None:
    [written] = client.generate(ALPHABET, max_tokens=8, temperature=0, logprobs=0).results()
    scored = openai_client.completions.create(
        model=MODEL, prompt=ALPHABET + written.text, max_tokens=0, logprobs=0, echo=True
    )
    [choice] = scored.choices
    assert (choice.text, scored.usage.completion_tokens) == (ALPHABET + written.text, 0)
    assert choice.logprobs.token_logprobs[0] is None
    last = choice.logprobs.token_logprobs[-len(written.token_ids) :]
    assert last == pytest.approx([one.logprob for one in written.logprobs], abs=CLOSE)
    stream = client.generate(ALPHABET + written.text, max_tokens=1, prompt_logprobs=0)
    stream.text()
    told = [one.logprob for one in stream.prompt_logprobs.logprobs[1:]]
    assert told == pytest.approx(choice.logprobs.token_logprobs[1:], abs=CLOSE)


def test_an_echo_has_the_same_numbers_and_offsets_streamed_and_whole(openai_client) -> None:
    """The reference is transformers in float32."""
    asked: dict[str, Any] = {
        "model": MODEL, "prompt": "Your answer: Yes", "echo": True, "logprobs": 1, "temperature": 0,
    }  # fmt: skip
    [scored] = openai_client.completions.create(**asked, max_tokens=0).choices
    first, *rest = scored.logprobs.token_logprobs
    assert first is None
    assert rest == pytest.approx([-8.06, -5.23, -5.41], abs=0.01)
    [whole] = openai_client.completions.create(**asked, max_tokens=4).choices
    block = whole.logprobs
    assert len(block.tokens) == 8
    assert block.text_offset[:4] == [0, 4, 11, 12]
    assert all(whole.text[at:].startswith(token) for at, token in zip(block.text_offset, block.tokens, strict=True))
    chunks = [chunk.choices[0] for chunk in openai_client.completions.create(**asked, max_tokens=4, stream=True)]
    assert "".join(choice.text for choice in chunks) == whole.text
    told = [choice.logprobs for choice in chunks if choice.logprobs]
    for name in ("tokens", "text_offset"):
        assert [item for one in told for item in getattr(one, name)] == getattr(block, name)
    assert [n for one in told for n in one.token_logprobs][1:] == pytest.approx(block.token_logprobs[1:], abs=CLOSE)
