"""Every family with tiny random weights through our runner, against the same weights in plain transformers.

The oracle is transformers' eager attention with its own masks and cache. Whole prompt, chunks of any size, a batch of
strangers, and decoding row by row must give its logits, in float32 within TOLERANCE, and its greedy tokens. Prompts are
several windows long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.sampling import SamplingParams
from tests.fixtures.tiny_models import FAMILIES, OTHER_FAMILIES, VOCABULARY, WINDOW, write_model
from workers.attention.registry import resolve_attention
from workers.config import EngineConfig
from workers.model.interface import SampleSpec, SequenceSlice
from workers.model.loader import attention_spec
from workers.model.runner import TorchRunner
from workers.model.weights import load_model, use_threads

TOLERANCE = 2e-4
"""On logits of standard deviation 2."""
MATTERS = 0.1
"""What a feature must change in some logit for its test to mean anything."""
PROMPT_TOKENS = 45
"""More than five windows; beyond it there is room for NEW_TOKENS in the shortest context."""
NEW_TOKENS = 12
BLOCK_SIZE = 4
NUM_BLOCKS = 80
BLOCKS_EACH = 16
"""Blocks of one sequence: 64 tokens."""
GREEDY = SampleSpec(SamplingParams(max_tokens=1, temperature=0.0), seed=0, choice=0, token_index=0)

Part = tuple[Sequence[int], int, int, int]
"""(tokens, start, end, owner): rows `start : end` of the sequence that has the blocks of `owner`."""


class Runner:
    """Our runner over one folder, and the logits that its model gave."""

    def __init__(self, folder: Path, attention: str, max_context: int | None) -> None:
        config = EngineConfig(
            str(folder),
            "tiny",
            dtype="float32",
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_context=max_context,
            attention=attention,
            threads=1,
        )
        use_threads(1)
        model = load_model(config)
        self._logits: Tensor | None = None
        model.module.register_forward_hook(self._keep)
        self._runner = TorchRunner(config, model, resolve_attention(attention, attention_spec(model, BLOCK_SIZE)))

    def _keep(self, module: object, given: object, output: Any) -> None:
        self._logits = output.logits[0]

    def step(self, *parts: Part) -> tuple[Tensor, tuple[int, ...]]:
        """One pass; for each part the logits `[parts, VOCABULARY]` of its last row, and the greedy token."""
        results = self._runner.forward([_slice(*part) for part in parts])
        tokens = []
        for result in results:
            assert result.sampled is not None
            assert not result.sampled.fault
            tokens.append(result.sampled.token_id)
        assert self._logits is not None
        return self._logits, tuple(tokens)

    def in_chunks(self, tokens: Sequence[int], chunk: int) -> tuple[list[int], Tensor]:
        """Positions and logits of the last row of every chunk."""
        ends = [min(begin + chunk, len(tokens)) for begin in range(0, len(tokens), chunk)]
        logits = [self.step((tokens, end - ((end - 1) % chunk + 1), end, 0))[0] for end in ends]
        return [end - 1 for end in ends], torch.cat(logits)


def _slice(tokens: Sequence[int], start: int, end: int, owner: int) -> SequenceSlice:
    # Every other owner's blocks run backwards: adjacent blocks are read in place, scattered ones gathered.
    blocks = range(owner * BLOCKS_EACH, (owner + 1) * BLOCKS_EACH)
    return SequenceSlice(tuple(tokens[start:end]), start, tuple(blocks if owner % 2 else reversed(blocks)), GREEDY)


@dataclass(frozen=True)
class Family:
    """A family's folder, its oracle, and one prompt with the oracle's greedy continuation."""

    name: str
    folder: Path
    oracle: Any
    prompt: tuple[int, ...]
    output: tuple[int, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        """All that the model reads."""
        return (*self.prompt, *self.output[:-1])

    def runner(self, attention: str = "cpu") -> Runner:
        return Runner(self.folder, attention, (FAMILIES | OTHER_FAMILIES)[self.name].max_context)

    def wanted(self, tokens: Sequence[int]) -> Tensor:
        """`[tokens, VOCABULARY]` from one causal pass of the oracle."""
        with torch.inference_mode():
            logits: Tensor = self.oracle(torch.tensor([list(tokens)])).logits[0]
        return logits


def load_oracle(folder: Path, **changes: Any) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32, **changes)
    model.generation_config.eos_token_id = None
    return model.eval()


def draw_tokens(count: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, VOCABULARY, (count,), generator=generator).tolist())


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    name: str = request.param
    folder = write_model(name, tmp_path_factory.mktemp(name))
    oracle = load_oracle(folder)
    prompt = draw_tokens(PROMPT_TOKENS, seed=0)
    generated = oracle.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)
    return Family(name, folder, oracle, prompt, tuple(generated[0, PROMPT_TOKENS:].tolist()))


@pytest.fixture(scope="module")
def runner(family: Family) -> Runner:
    return family.runner()


every_family = pytest.mark.parametrize("family", list(FAMILIES), indirect=True, scope="module")


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, atol=TOLERANCE, rtol=0.0)


@every_family
@pytest.mark.parametrize("attention", ["cpu", pytest.param("reference", marks=pytest.mark.slow)])
def test_a_prompt_and_its_greedy_continuation(family: Family, attention: str) -> None:
    runner = family.runner(attention)
    wanted = family.wanted(family.tokens)
    known = list(family.prompt)
    start = 0
    for expected in family.output:
        logits, (token,) = runner.step((known, start, len(known), 0))
        close(logits[0], wanted[len(known) - 1])
        assert token == expected
        start = len(known)
        known.append(token)


@every_family
@pytest.mark.parametrize(
    "chunk", [5, pytest.param(1, marks=pytest.mark.slow), pytest.param(16, marks=pytest.mark.slow)]
)
def test_chunks_of_any_size(family: Family, runner: Runner, chunk: int) -> None:
    positions, logits = runner.in_chunks(family.tokens, chunk)
    close(logits, family.wanted(family.tokens)[positions])


@every_family
def test_a_batch_of_decodes_and_chunks(family: Family, runner: Runner) -> None:
    """Five sequences of different lengths: alone at first, then two that decode beside three in chunks."""
    texts = [draw_tokens(count, seed=i) for i, count in enumerate((50, 37, 20, 61, 9))]
    wanted = [family.wanted(text) for text in texts]
    computed = [44, 33, 3, 21, 0]
    for i, end in enumerate(computed):
        if end:
            close(runner.step((texts[i], 0, end, i))[0][0], wanted[i][end - 1])
    for rows in ((1, 1, 7, 30, 9), (1, 1, 1, 1), (2, 1, 6, 9)):
        ends = [done + count for done, count in zip(computed, rows, strict=False)]
        parts: list[Part] = [(texts[i], computed[i], end, i) for i, end in enumerate(ends)]
        logits, _ = runner.step(*parts)
        for i, end in enumerate(ends):
            close(logits[i], wanted[i][end - 1])
            computed[i] = end


@pytest.mark.slow
@pytest.mark.parametrize("family", list(OTHER_FAMILIES), indirect=True, scope="module")
def test_families_without_a_line_of_their_own(family: Family) -> None:
    """A long chunk, short ones, and a decode beside a stranger's chunk."""
    runner, wanted = family.runner(), family.wanted(family.tokens)
    positions, logits = runner.in_chunks(family.tokens, 21)
    close(logits, wanted[positions])
    stranger = draw_tokens(30, seed=9)
    end = PROMPT_TOKENS
    logits, _ = runner.step((family.prompt, end - 1, end, 0), (stranger, 0, 30, 1))
    close(logits, torch.stack([wanted[end - 1], family.wanted(stranger)[-1]]))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": WINDOW + 1}),
        ("qwen2-window", {"sliding_window": WINDOW - 1}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"layer_types": ["full_attention"] * 3}),
        ("gemma3", {"layer_types": ["sliding_attention"] * 3}),
        ("phi3", {"sliding_window": None}),
    ],
    indirect=["family"],
)
def test_what_the_comparison_would_notice(family: Family, changes: dict[str, Any]) -> None:
    """Windows and caps change these models' logits by far more than the tolerance."""
    without = load_oracle(family.folder, **changes)
    with torch.inference_mode():
        logits = without(torch.tensor([family.tokens])).logits[0]
    assert float((logits - family.wanted(family.tokens)).abs().max()) > MATTERS
