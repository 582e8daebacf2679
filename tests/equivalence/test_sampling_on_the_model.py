"""Penalties and log probabilities of the embedded model through the whole engine, against transformers in float32.

The ids under penalties are what transformers gives with its own processors. The prompt repeats itself, so that a
penalty on the wrong tokens shows in the first or the seventh id.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace.logprobs import TokenLogprob
from headrace.request import BoundRequest, Request
from headrace.sampling import SamplingParams
from headrace.tokenizer import Tokenizer
from workers.attention.interface import AttentionSpec
from workers.attention.registry import resolve_attention
from workers.config import EngineConfig
from workers.engine import Engine
from workers.model.runner import TorchRunner
from workers.model.weights import LoadedModel, load_model, use_threads

TEXT = "日本語日本語日本語日本語"
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, seed=0, ignore_eos=True)
PLAIN = [23274, 115, 40993, 179, 120, 248, 23274, 115]
ON_OUTPUT = [23274, 115, 40993, 179, 120, 248, 8083, 219]
"""Presence and frequency penalty 2: felt only where the output repeats itself."""
ON_PROMPT_FIRST = 8083
"""Repetition penalty 1.3: the prompt counts, so the very first id is another."""
NEAR = 1e-3
"""Float32 logits of other kernels and other row counts."""
CHUNKS = [5, pytest.param(512, marks=pytest.mark.slow)]
MakeEngine = Callable[[int], Engine]


@pytest.fixture(scope="module")
def prompt(model_path: Path) -> tuple[int, ...]:
    return tuple(Tokenizer.load(model_path).encode(TEXT, add_special=False))


@pytest.fixture(scope="module")
def make_engine(model_path: Path) -> MakeEngine:
    use_threads(0)
    config = EngineConfig(str(model_path), "sampling", dtype="float32", num_blocks=200)
    model: LoadedModel = load_model(config)
    geometry = model.geometry
    spec = AttentionSpec(
        torch.device("cpu"), torch.float32, geometry.num_heads, geometry.num_kv_heads, geometry.head_dim, 16
    )

    def make(chunk_tokens: int) -> Engine:
        chunked = replace(config, chunk_tokens=chunk_tokens)
        return Engine(TorchRunner(chunked, model, resolve_attention("auto", spec)), chunked, tokenizer=None)

    return make


Told = tuple[list[int], list[TokenLogprob], list[TokenLogprob]]


def outputs(engine: Engine, prompt: tuple[int, ...], several: list[SamplingParams]) -> list[Told]:
    """Tokens, their log probabilities and the prompt's, of requests that run in one batch."""
    for i, params in enumerate(several):
        request = Request(f"r{i}", "sampling", prompt, params)
        engine.add(BoundRequest(request, epoch=1, owner="router~1", inbox_id=f"1-{i}", journal=()))
    told: list[Told] = [([], [], []) for _ in several]
    unfinished = len(several)
    while unfinished:
        frame = engine.step()
        assert frame is not None
        for part in frame.parts:
            tokens, logprobs, scores = told[int(part.request_id[1:])]
            tokens += part.token_ids
            logprobs += part.logprobs
            scores += part.prompt_logprobs
            unfinished -= part.finish is not None
    return told


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
def test_penalties_look_at_what_they_should_and_reach_no_neighbour(
    make_engine: MakeEngine, prompt: tuple[int, ...], chunk_tokens: int
) -> None:
    several = [
        GREEDY,
        replace(GREEDY, presence_penalty=2.0, frequency_penalty=2.0),
        replace(GREEDY, repetition_penalty=1.3),
        GREEDY,
    ]
    engine = make_engine(chunk_tokens)
    for _ in ("cold", "cached"):
        plain, on_output, on_prompt, neighbour = (tokens for tokens, _, _ in outputs(engine, prompt, several))
        assert (plain, on_output, neighbour) == (PLAIN, ON_OUTPUT, PLAIN)
        assert on_prompt[0] == ON_PROMPT_FIRST


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
def test_log_probabilities_are_those_of_transformers(
    make_engine: MakeEngine, model_path: Path, prompt: tuple[int, ...], chunk_tokens: int
) -> None:
    from transformers import AutoModelForCausalLM

    params = replace(GREEDY, logprobs=3, prompt_logprobs=2)
    ((tokens, logprobs, scores),) = outputs(make_engine(chunk_tokens), prompt, [params])
    assert tokens == PLAIN
    reference = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    known = [*prompt, *tokens]
    with torch.inference_mode():
        expected = reference(torch.tensor([known])).logits[0].double().log_softmax(-1)
    assert len(logprobs) == len(tokens)
    assert len(scores) == len(prompt)
    assert scores[0].rank == 0
    for position, told in enumerate([*scores[1:], *logprobs]):
        row, top = expected[position], len(told.top)
        assert told.logprob == pytest.approx(float(row[known[position + 1]]), abs=NEAR)
        assert [value for _, value in told.top] == pytest.approx(row.topk(top).values.tolist(), abs=NEAR)
    assert {told.rank for told in logprobs} == {1}
