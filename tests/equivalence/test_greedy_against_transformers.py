"""Greedy float32 output of the engine, token by token, against what transformers' own `generate` answered.

The references were made once by tests/fixtures/make_references.py. Whatever the engine does with a request (alone, in
a batch, in chunks of any size, preempted and recomputed), its tokens must be the reference's. They may part only
where the reference itself was within NEAR_TIE of another token, and for at most one prompt.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from headrace.frame import FinishReason, Frame
from headrace.request import BoundRequest, Request
from headrace.sampling import SamplingParams
from headrace.tokenizer import Tokenizer
from workers.attention.interface import AttentionSpec
from workers.attention.registry import resolve_attention
from workers.config import EngineConfig
from workers.engine import Engine
from workers.model.runner import TorchRunner
from workers.model.weights import LoadedModel, load_model, use_threads

FIXTURES = Path(__file__).parents[1] / "fixtures"
NEAR_TIE = 1e-3
MAX_PARTED = 1
BATCH = 32
MAX_ITERATIONS = 20_000
NEVER_PRODUCED = (0,)
"""A stop id that occurs in no reference: so the engine must guess where outputs end."""
FEW = (
    "one-token",
    "english-chat-system",
    "german",
    "spanish-chat",
    "russian-chat",
    "arabic",
    "chinese-chat",
    "japanese",
    "emoji-line",
    "code-python",
    "markdown",
    "conversation",
)


@dataclass(frozen=True)
class Case:
    name: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    gaps: tuple[float, ...]


@pytest.fixture(scope="module")
def cases(model_path: Path) -> dict[str, Case]:
    tokenizer = Tokenizer.load(model_path)
    texts = {p["name"]: p["text"] for p in _lines("prompts.jsonl")}
    found = {}
    for reference in _lines("references.jsonl"):
        name = reference["name"]
        prompt = tuple(tokenizer.encode(texts[name], add_special=False))
        assert len(prompt) == reference["prompt_tokens"], f"{name} is tokenised differently than for its reference"
        found[name] = Case(name, prompt, tuple(reference["output"]), tuple(reference["gaps"]))
    return found


def _lines(name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (FIXTURES / name).read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def few(cases: dict[str, Case]) -> list[Case]:
    return [cases[name] for name in FEW]


@pytest.fixture(scope="module")
def model(model_path: Path) -> LoadedModel:
    use_threads(0)
    return load_model(_config(model_path))


def _config(model_path: Path, num_blocks: int = 1_600, chunk_tokens: int = 512) -> EngineConfig:
    return EngineConfig(
        str(model_path), "equivalence", dtype="float32", num_blocks=num_blocks, chunk_tokens=chunk_tokens
    )


class Runs:
    """Runs cases through engines that share one set of weights."""

    def __init__(self, model_path: Path, model: LoadedModel) -> None:
        self._path = model_path
        self._model = model

    def engine(
        self,
        num_blocks: int = 1_600,
        chunk_tokens: int = 512,
        policy: str = "chunked",
        max_sequences: int = 256,
    ) -> Engine:
        config = _config(self._path, num_blocks, chunk_tokens)
        geometry = self._model.geometry
        spec = AttentionSpec(
            torch.device("cpu"), torch.float32, geometry.num_heads, geometry.num_kv_heads, geometry.head_dim, 16
        )
        runner = TorchRunner(config, self._model, resolve_attention("auto", spec))
        return Engine(runner, replace(config, policy=policy, max_sequences=max_sequences), tokenizer=None)

    def outputs(self, engine: Engine, cases: Sequence[Case]) -> tuple[list[tuple[int, ...]], Frame]:
        """Submits all cases at once; returns their tokens and the last frame."""
        for i, case in enumerate(cases):
            params = SamplingParams(
                max_tokens=len(case.output), temperature=0.0, seed=0, ignore_eos=True, stop_token_ids=NEVER_PRODUCED
            )
            request = Request(f"r{i}", "equivalence", case.prompt, params)
            engine.add(BoundRequest(request, epoch=1, owner="router~1", inbox_id=f"1-{i}", journal=()))
        tokens: dict[str, list[int]] = {f"r{i}": [] for i in range(len(cases))}
        unfinished = set(tokens)
        frame = None
        for _ in range(MAX_ITERATIONS):
            frame = engine.step()
            assert frame is not None, f"the engine idles with {len(unfinished)} requests unfinished"
            for part in frame.parts:
                assert part.first_index == len(tokens[part.request_id]), "a token is missing or came twice"
                tokens[part.request_id] += part.token_ids
                if part.finish is not None:
                    assert part.finish is FinishReason.LENGTH, part.detail
                    unfinished.remove(part.request_id)
            if not unfinished:
                return [tuple(tokens[f"r{i}"]) for i in range(len(cases))], frame
        raise AssertionError(f"{len(unfinished)} requests unfinished after {MAX_ITERATIONS} iterations")


@pytest.fixture(scope="module")
def runs(model_path: Path, model: LoadedModel) -> Runs:
    return Runs(model_path, model)


def check(cases: Sequence[Case], outputs: Sequence[tuple[int, ...]]) -> None:
    """Equal, or parted at a near tie of the reference; at most MAX_PARTED prompts part, and each is printed."""
    parted = set()
    for case, output in zip(cases, outputs, strict=True):
        assert len(output) == len(case.output)
        place = next((i for i, pair in enumerate(zip(output, case.output, strict=True)) if pair[0] != pair[1]), None)
        if place is None:
            continue
        gap = case.gaps[place]
        told = f"{case.name} parts at output token {place}, where the reference's top-2 gap is {gap}"
        warnings.warn(told, stacklevel=2)  # shown at the end of the run even when the test passes
        assert gap < NEAR_TIE, f"{case.name}: token {place} is {output[place]}, not {case.output[place]}; gap {gap}"
        parted.add(case.name)
    assert len(parted) <= MAX_PARTED, f"{len(parted)} prompts part from the reference"


def filled(cases: Sequence[Case], size: int) -> list[Case]:
    """The cases over and over until there are `size`."""
    return [cases[i % len(cases)] for i in range(size)]


def teach_short_outputs(runs: Runs, engine: Engine) -> None:
    """Finishes many one-token requests, so that the engine expects short outputs, over-commits and has to preempt."""
    runs.outputs(engine, [Case("short", (504,), (0,), (1.0,))] * BATCH)


def smallest_pool(cases: Sequence[Case], block_size: int = 16) -> int:
    """Blocks that hold the largest case and no more than a little beside it."""
    return max(-(-(len(case.prompt) + len(case.output)) // block_size) for case in cases) + 4


# ---- twelve prompts: `make test` ----------------------------------------------------------------------------------


def test_alone(runs: Runs, few: list[Case]) -> None:
    engine = runs.engine()
    check(few, [runs.outputs(engine, [case])[0][0] for case in few])


def test_in_a_batch_of_32(runs: Runs, few: list[Case]) -> None:
    batch = filled(few, BATCH)
    outputs, frame = runs.outputs(runs.engine(), batch)
    check(batch, outputs)
    assert frame.load.preemptions_total == 0


@pytest.mark.parametrize("chunk_tokens", [16, 64])
def test_in_chunks(runs: Runs, few: list[Case], chunk_tokens: int) -> None:
    outputs, _ = runs.outputs(runs.engine(chunk_tokens=chunk_tokens), few)
    check(few, outputs)


def test_preempted_and_recomputed(runs: Runs, few: list[Case]) -> None:
    engine = runs.engine(num_blocks=smallest_pool(few))
    teach_short_outputs(runs, engine)
    outputs, frame = runs.outputs(engine, few)
    check(few, outputs)
    assert frame.load.preemptions_total > 0
    assert frame.load.held_blocks == 0


# ---- all 64: `make test-all` --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", ["static", "dynamic", "continuous"])
def test_few_under_every_other_policy(runs: Runs, few: list[Case], policy: str) -> None:
    engine = runs.engine(policy=policy, max_sequences=len(few) // 2)  # two full batches, one after the other
    uneven = [replace(case, output=case.output[: len(case.output) // (1 + i % 3)]) for i, case in enumerate(few)]
    outputs, frame = runs.outputs(engine, uneven)
    check(uneven, outputs)
    padded = policy != "continuous"
    assert (frame.load.padding_rows_total > 0, frame.load.slot_steps_wasted_total > 0) == (padded, padded)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_alone(runs: Runs, cases: dict[str, Case]) -> None:
    engine = runs.engine()
    check(list(cases.values()), [runs.outputs(engine, [case])[0][0] for case in cases.values()])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("chunk_tokens", [16, 64, 512])
def test_all_in_batches_of_32(runs: Runs, cases: dict[str, Case], chunk_tokens: int) -> None:
    everything = list(cases.values())
    outputs = []
    for first in range(0, len(everything), BATCH):
        engine = runs.engine(chunk_tokens=chunk_tokens)
        outputs += runs.outputs(engine, everything[first : first + BATCH])[0]
    check(everything, outputs)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_preempted_and_recomputed(runs: Runs, cases: dict[str, Case]) -> None:
    everything = list(cases.values())
    engine = runs.engine(num_blocks=smallest_pool(everything))
    teach_short_outputs(runs, engine)
    outputs, frame = runs.outputs(engine, everything)
    check(everything, outputs)
    assert frame.load.preemptions_total > 0
    assert frame.load.held_blocks == 0
