"""A pool far too small for what it holds: greedy, drawn, scored and grammatical streams are preempted, some cancelled,
and every one that ends has the tokens it has alone on a large pool (DESIGN section 6; a user's report of another server
whose preempted streams lost or repeated tokens).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.frame import FinishReason
from headrace.request import Request
from headrace.sampling import Grammar, GrammarKind, SamplingParams
from headrace.tokenizer import Tokenizer
from tests.fixtures.scripted_runner import Client, bind
from workers.attention.registry import resolve_attention
from workers.config import EngineConfig
from workers.engine import Engine
from workers.model.loader import attention_spec
from workers.model.runner import TorchRunner
from workers.model.weights import LoadedModel, load_model, use_threads

PROMPT = "Once upon a time, in a small village by the sea, there lived a fisherman who"
OUTPUT_TOKENS = 60
SMALL_POOL_BLOCKS, LARGE_POOL_BLOCKS = 14, 200
"""Of 16 tokens: two and a half of the eight streams fit the small one."""
NEVER_PRODUCED = (49_151,)
"""A stop id lets the engine guess where outputs end, so that it admits too much."""
SCHEMA = {"type": "array", "items": {"type": "integer"}, "minItems": 12, "maxItems": 12}


@pytest.fixture(scope="module")
def tokenizer(model_path: Path) -> Tokenizer:
    return Tokenizer.load(model_path)


@pytest.fixture(scope="module")
def config(model_path: Path) -> EngineConfig:
    return EngineConfig(str(model_path), "m", dtype="bfloat16", row_invariant=True, max_context=160, threads=2)


@pytest.fixture(scope="module")
def model(config: EngineConfig) -> LoadedModel:
    use_threads(config.threads)
    return load_model(config)


def engine_with(
    num_blocks: int, config: EngineConfig, model: LoadedModel, tokenizer: Tokenizer, *, cache: bool
) -> Engine:
    config = replace(config, num_blocks=num_blocks, prefix_cache=cache)
    runner = TorchRunner(config, model, resolve_attention("invariant", attention_spec(model, config.block_size)))
    return Engine(runner, config, tokenizer)


def streams(tokenizer: Tokenizer) -> list[Request]:
    prompt = tuple(tokenizer.encode(PROMPT, add_special=False))
    schema = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
    return [
        Request(
            f"r{k}",
            "m",
            prompt,
            SamplingParams(
                max_tokens=OUTPUT_TOKENS,
                temperature=0.8 if k % 2 else 0.0,
                seed=k,
                ignore_eos=True,
                stop_token_ids=NEVER_PRODUCED,
                logprobs=1 if k in (2, 3) else None,
                grammar=schema if k == 7 else None,
            ),
        )
        for k in range(8)
    ]


def run(engine: Engine, requests: Sequence[Request], cancel: Sequence[str] = ()) -> Client:
    """To the end; those of `cancel` are given up at the first preemption."""
    client = Client()
    for request in requests:
        engine.add(bind(request))
    pending = list(cancel)
    while len(client.finishes) < len(requests):
        frame = engine.step()
        client.take(frame)
        if frame is None:
            assert engine._mailbox.wait_for_command(20), "the engine idles"
        elif frame.load.preemptions_total and pending:
            for request_id in pending:
                engine.cancel(request_id, "9-0")
            pending = []
    engine.check()
    return client


def learn_that_outputs_are_short(engine: Engine) -> None:
    """So that it admits too many."""
    params = SamplingParams(max_tokens=1, stop_token_ids=NEVER_PRODUCED, seed=1)
    run(engine, [Request(f"s{number}", "m", (number + 5,), params) for number in range(40)])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_preempted_streams_have_the_tokens_they_have_alone(
    config: EngineConfig, model: LoadedModel, tokenizer: Tokenizer
) -> None:
    requests = streams(tokenizer)
    large = engine_with(LARGE_POOL_BLOCKS, config, model, tokenizer, cache=False)
    alone = {request.id: run(large, [request]) for request in requests}
    for cache in (False, True):
        small = engine_with(SMALL_POOL_BLOCKS, config, model, tokenizer, cache=cache)
        learn_that_outputs_are_short(small)
        client = run(small, requests, cancel=("r4", "r5"))
        load = small.load()
        assert load.preemptions_total > 0, "nothing was preempted"
        assert (load.running, load.waiting, load.held_blocks) == (0, 0, 0)
        for request in requests:
            place = (request.id, 0)
            if request.id in ("r4", "r5"):
                assert client.finishes[place] is FinishReason.CANCELLED
                continue
            assert client.finishes[place] is alone[request.id].finishes[place]
            assert client.tokens[place] == alone[request.id].tokens[place], f"{request.id}, cache {cache}"
            if request.sampling.logprobs:
                assert client.logprobs[place] == alone[request.id].logprobs[place]
                assert len(client.logprobs[place]) == OUTPUT_TOKENS
