"""The equivalence matrix: in row-invariant mode a request gets the same logits, bit for bit, and so the same tokens,
alone, in a batch of 32, in chunks of any size, from a cold and from a warm cache, after a preemption, after its KV went
through host memory, as one of n choices, and continued from a journal by another worker.

Every way runs the real engine; what is compared is what the sampler was given. The truth is each request alone, on an
engine without a cache.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.request import BoundRequest, Request
from headrace.sampling import SamplingParams
from tests.fixtures.tiny_models import FAMILIES, write_model
from workers.attention.registry import resolve_attention
from workers.config import EngineConfig
from workers.engine import Engine
from workers.kv.moves import MoveKind
from workers.model.invariant import differing_layout
from workers.model.loader import attention_spec
from workers.model.runner import TorchRunner
from workers.model.weights import LoadedModel, load_model, use_threads
from workers.scheduler.policy import policy_names

BATCH = 32
MAX_ITERATIONS = 5_000
NEVER_PRODUCED = (1 << 30,)
"""With a stop id the engine has to guess where outputs end, so that it can be wrong."""
DTYPES = ("float32", "bfloat16")
FAST = (("llama", "float32"), ("gemma3", "bfloat16"), ("mixtral", "bfloat16"))
"""What the default suite runs; the slow one runs every family in both number formats, and the embedded model."""
FAMILY_PARAMETERS = [
    pytest.param(family, dtype, marks=() if (family, dtype) in FAST else pytest.mark.slow)
    for family in FAMILIES
    for dtype in DTYPES
]


@dataclass(frozen=True)
class Asked:
    name: str
    prompt: tuple[int, ...]
    output_tokens: int
    temperature: float
    n: int = 1
    journal: tuple[int, ...] = ()

    def bound(self, number: int) -> BoundRequest:
        params = SamplingParams(
            max_tokens=self.output_tokens,
            temperature=self.temperature,
            seed=len(self.prompt),
            ignore_eos=True,
            stop_token_ids=NEVER_PRODUCED,
        )
        request = Request(self.name, "matrix", self.prompt, params, n=self.n)
        journal = (self.journal,) if self.journal else ()
        return BoundRequest(request, epoch=1, owner="router~1", inbox_id=f"1-{number}", journal=journal)


Logits = dict[tuple[str, int, int], torch.Tensor]
"""By request, choice and token index, what the sampler was given."""


class Observed:
    """A runner that remembers logits, rows and block moves."""

    def __init__(self, runner: TorchRunner) -> None:
        self._runner = runner
        self._sampler = runner._sampler
        runner._sampler = self  # type: ignore[assignment]
        self.logits: Logits = {}
        self.rows = 0
        self.moves: Counter[MoveKind] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, slices: Sequence[Any], moves: Sequence[Any] = ()) -> Any:
        self.rows += sum(len(piece.token_ids) for piece in slices)
        self.moves.update(move.kind for move in moves)
        return self._runner.forward(slices, moves)

    def sample(self, logits: torch.Tensor, specs: Sequence[Any]) -> Any:
        for row, spec in zip(logits, specs, strict=True):
            place = (_name_of(spec), spec.choice, spec.token_index)
            known = self.logits.setdefault(place, row.clone())
            assert torch.equal(known, row), f"{place} was computed twice, with other bits"
        return self._sampler.sample(logits, specs)


def _name_of(spec: Any) -> str:
    return NAMES[tuple(spec.tokens[: spec.prompt_tokens])]


NAMES: dict[tuple[int, ...], str] = {}
"""Requests by prompt: all prompts differ."""


class Bench:
    """Engines over one set of weights, and the truth about a set of requests."""

    def __init__(self, config: EngineConfig, requests: Sequence[Asked]) -> None:
        self._config = config
        self._model: LoadedModel = load_model(config)
        self.requests = tuple(requests)
        NAMES.update({asked.prompt: asked.name for asked in requests})
        self.truth: Logits = {}
        engine, observed = self.engine()
        for asked in self.requests:
            self.run(engine, [asked])
        self.truth = observed.logits

    def engine(self, **changes: Any) -> tuple[Engine, Observed]:
        """By default without prefix cache, and with blocks for everything."""
        config = replace(self._config, **{"prefix_cache": False, **changes})
        attention = resolve_attention("invariant", attention_spec(self._model, config.block_size))
        observed = Observed(TorchRunner(config, self._model, attention))
        ticks = itertools.count()  # time passes with every look, so that a policy that collects a batch comes to an end
        engine = Engine(observed, config, tokenizer=None, clock=lambda: 0.01 * next(ticks))  # type: ignore[arg-type]
        return engine, observed

    @property
    def block_size(self) -> int:
        return self._config.block_size

    def stock_runner(self) -> TorchRunner:
        attention = resolve_attention("cpu", attention_spec(self._model, self._config.block_size))
        return TorchRunner(replace(self._config, row_invariant=False), self._model, attention)

    def run(self, engine: Engine, requests: Sequence[Asked]) -> dict[tuple[str, int], tuple[int, ...]]:
        for number, asked in enumerate(requests):
            engine.add(asked.bound(number))
        tokens: dict[tuple[str, int], list[int]] = {(a.name, c): [] for a in requests for c in range(a.n)}
        unfinished = set(tokens)
        for _ in range(MAX_ITERATIONS):
            frame = engine.step()
            for part in frame.parts if frame is not None else ():
                place = (part.request_id, part.choice)
                tokens[place] += part.token_ids
                if part.finish is not None:
                    assert part.finish.value == "length", part.detail
                    unfinished.remove(place)
            if not unfinished:
                engine.check()
                return {place: tuple(ids) for place, ids in tokens.items()}
        raise AssertionError(f"{len(unfinished)} choices unfinished")

    def assert_true(self, observed: Observed) -> None:
        """Everything sampled for choice 0 was sampled from the truth's bits."""
        mine = {place: row for place, row in observed.logits.items() if place[1] == 0}
        assert mine
        wrong = [place for place, row in mine.items() if not torch.equal(row, self.truth[place])]
        assert not wrong, f"{len(wrong)} of {len(mine)} logit rows differ, first {wrong[0]}"


# ---- the ways ------------------------------------------------------------------------------------------------------


def in_a_batch(bench: Bench) -> None:
    engine, observed = bench.engine()
    bench.run(engine, bench.requests)
    bench.assert_true(observed)
    assert len(observed.logits) == len(bench.truth)


def under_every_policy(bench: Bench) -> None:
    for policy in policy_names():
        engine, observed = bench.engine(policy=policy)
        bench.run(engine, bench.requests[:8])
        bench.assert_true(observed)


def in_small_chunks(bench: Bench) -> None:
    for chunk_tokens in (7, 16, 45):
        engine, observed = bench.engine(chunk_tokens=chunk_tokens)
        bench.run(engine, bench.requests[:8])
        bench.assert_true(observed)


def from_a_warm_cache(bench: Bench) -> None:
    engine, observed = bench.engine(prefix_cache=True)
    bench.run(engine, bench.requests)
    cold_rows = observed.rows
    bench.run(engine, bench.requests)
    assert observed.rows - cold_rows < cold_rows / 2, "the cache was not warm"
    bench.assert_true(observed)


def after_preemption(bench: Bench) -> None:
    longest = max(len(a.prompt) + a.output_tokens for a in bench.requests)
    for prefix_cache in (False, True):
        engine, observed = bench.engine(prefix_cache=prefix_cache, num_blocks=-(-longest // bench.block_size) + 2)
        for asked in bench.requests:  # it learns that outputs are short
            bench.run(engine, [replace(asked, output_tokens=1)])
        bench.run(engine, bench.requests[:12])
        bench.assert_true(observed)
        assert prefix_cache or engine.load().preemptions_total > 0, "nothing was preempted"


def through_host_memory(bench: Bench) -> None:
    longest = max(len(a.prompt) + a.output_tokens for a in bench.requests)
    engine, observed = bench.engine(
        prefix_cache=True, num_blocks=-(-longest // bench.block_size) + 2, host_kv_bytes=64 << 20
    )
    for asked in (*bench.requests[:12], *bench.requests[:12]):
        bench.run(engine, [asked])
    assert observed.moves[MoveKind.OUT], "nothing went out"
    assert observed.moves[MoveKind.BACK], "nothing came back"
    bench.assert_true(observed)


def as_one_of_three_choices(bench: Bench) -> None:
    engine, observed = bench.engine(prefix_cache=True)
    several = [replace(asked, n=3) for asked in bench.requests[:8]]
    tokens = bench.run(engine, several)
    bench.assert_true(observed)
    greedy = [asked for asked in several if asked.temperature == 0]
    assert greedy
    for asked in greedy:
        assert len({tokens[asked.name, choice] for choice in range(3)}) == 1
        for choice, index in ((c, i) for c in (1, 2) for i in range(asked.output_tokens)):
            assert torch.equal(observed.logits[asked.name, choice, index], bench.truth[asked.name, 0, index])


def continued_from_a_journal(bench: Bench) -> None:
    engine, _ = bench.engine()
    tokens = bench.run(engine, bench.requests[:8])
    other, observed = bench.engine(chunk_tokens=19)
    halves = [replace(a, journal=tokens[a.name, 0][: a.output_tokens // 2]) for a in bench.requests[:8]]
    rest = bench.run(other, halves)
    bench.assert_true(observed)
    for half in halves:
        assert half.journal + rest[half.name, 0] == tokens[half.name, 0]


WAYS: tuple[Callable[[Bench], None], ...] = (
    in_a_batch,
    under_every_policy,
    in_small_chunks,
    from_a_warm_cache,
    after_preemption,
    through_host_memory,
    as_one_of_three_choices,
    continued_from_a_journal,
)


# ---- tiny models of every family ------------------------------------------------------------------------------------


def _requests(vocabulary: int, prompt_tokens: tuple[int, int], output_tokens: int) -> list[Asked]:
    """A batch of prompts of random tokens, half of them greedy."""
    draw = random.Random(20)
    return [
        Asked(
            f"r{i}",
            tuple(draw.randrange(3, vocabulary) for _ in range(draw.randint(*prompt_tokens))),
            output_tokens,
            temperature=0.0 if i % 2 else 0.8,
        )
        for i in range(BATCH)
    ]


@pytest.mark.parametrize(("family", "dtype"), FAMILY_PARAMETERS)
def test_a_family_has_the_same_bits_every_way(family: str, dtype: str, tmp_path: Path) -> None:
    use_threads(1)
    config = EngineConfig(
        str(write_model(family, tmp_path)),
        family,
        dtype=dtype,
        num_blocks=600,
        block_size=4,
        max_context=FAMILIES[family].max_context,
        row_invariant=True,
        threads=1,
    )
    bench = Bench(config, _requests(vocabulary=97, prompt_tokens=(3, 45), output_tokens=9))
    for way in WAYS:
        way(bench)


# ---- the embedded model ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=DTYPES)
def embedded(request: pytest.FixtureRequest, model_path: Path) -> Bench:
    use_threads(2)
    config = EngineConfig(
        str(model_path), "embedded", dtype=request.param, num_blocks=1_600, block_size=4, row_invariant=True
    )
    return Bench(config, _requests(vocabulary=49_000, prompt_tokens=(5, 60), output_tokens=6))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_the_embedded_model_has_the_same_bits(way: Callable[[Bench], None], embedded: Bench) -> None:
    way(embedded)


@pytest.mark.slow
def test_stock_kernels_do_not(embedded: Bench) -> None:
    """So the matrix would notice, and so does the probe that a worker in row-invariant mode starts with."""
    stock, invariant = embedded.stock_runner(), embedded.engine()[1]
    limits = (stock.shape.vocab_size, 64, embedded.block_size)
    assert differing_layout(stock._logits, *limits) != ""
    assert differing_layout(invariant._logits, *limits) == ""
