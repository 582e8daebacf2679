"""The sampler against a float64 reference written independently, row by row."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headrace.sampling import SamplingParams
from workers.model.interface import Sampled, SampleSpec
from workers.sampling import parameters
from workers.sampling.sampler import Sampler

VOCABULARY = 60


def sample(logits: Tensor, specs: list[SampleSpec]) -> tuple[Sampled, ...]:
    return Sampler(logits.shape[1], logits.device).sample(logits, specs)


def spec(seed: int = 0, index: int = 0, banned: tuple[int, ...] = (), **params: object) -> SampleSpec:
    settings = {"temperature": 1.0} | params
    return SampleSpec(SamplingParams(max_tokens=1, **settings).validated(), seed, 0, index, banned)  # type: ignore[arg-type]


def tokens(logits: Tensor, specs: list[SampleSpec]) -> list[int]:
    results = sample(logits, specs)
    assert not any(result.fault for result in results)
    return [result.token_id for result in results]


def reference_probabilities(logits: list[float], params: SamplingParams) -> list[float]:
    """Biases, temperature, top-k, top-p and min-p in this order, in plain Python floats; ties at an edge stay in
    together.
    """
    biases = dict(params.logit_bias)
    logits = [x + biases.get(i, 0.0) for i, x in enumerate(logits)]
    peak = max(logits)
    weights = [math.exp((x - peak) / params.temperature) for x in logits]
    if params.top_k:
        edge = sorted(weights, reverse=True)[min(params.top_k, len(weights)) - 1]
        weights = [w if w >= edge else 0.0 for w in weights]
    if params.top_p < 1.0:
        reached, total, edge = 0.0, math.fsum(weights), 0.0
        for weight in sorted(weights, reverse=True):
            reached, edge = reached + weight, weight
            if reached >= params.top_p * total:
                break
        weights = [w if w >= edge else 0.0 for w in weights]
    weights = [w if w >= params.min_p * max(weights) else 0.0 for w in weights]
    total = math.fsum(weights)
    return [w / total for w in weights]


def chi_square_limit(degrees: int) -> float:
    """What a chi-square variable exceeds with probability 1e-4 (Wilson and Hilferty's approximation)."""
    z = 3.719
    return degrees * (1 - 2 / (9 * degrees) + z * math.sqrt(2 / (9 * degrees))) ** 3


def assert_frequencies(logits: Tensor, draws: int, params: dict[str, object]) -> None:
    """Chi-square of `draws` from `logits` `[vocabulary]`, each with a token index of its own."""
    expected = reference_probabilities(logits.tolist(), spec(**params).params)
    counts = [0] * len(expected)
    at_once = min(draws, max(500, 1_000_000 // len(expected)))
    for first in range(0, draws, at_once):
        specs = [spec(seed=11, index=first + i, **params) for i in range(at_once)]
        for token in tokens(logits.expand(at_once, -1), specs):
            counts[token] += 1
    assert all(count == 0 for count, p in zip(counts, expected, strict=True) if p == 0.0)
    # Rare ids are pooled, as the statistic needs about five expected hits per cell.
    cells = [(c, p * draws) for c, p in zip(counts, expected, strict=True) if p * draws >= 5]
    rest = (sum(counts) - sum(c for c, _ in cells), draws - sum(e for _, e in cells))
    cells += [rest] if rest[1] >= 5 else []
    statistic = sum((c - e) ** 2 / e for c, e in cells)
    assert statistic <= chi_square_limit(max(len(cells) - 1, 1))


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 12},
        {"top_p": 0.8},
        {"top_p": 0.3},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.7},
        {"top_k": 1},
        {"top_p": 1e-6},
        {"min_p": 0.05},
        {"temperature": 3.0, "top_p": 0.9, "min_p": 0.2},
        {
            "temperature": 2.0,
            "top_k": 30,
            "top_p": 0.95,
            "min_p": 0.1,
            "logit_bias": ((4, 3.0), (5, -100.0), (59, 6.5)),
        },
    ],
    ids=lambda params: "-".join(params) or "plain",
)
def test_frequencies_follow_the_reference(params: dict[str, object]) -> None:
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(3)) * 2
    assert_frequencies(logits, 10_000, params)


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [2_999, 12_800])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"top_p": 0.5},
        {"temperature": 0.7, "top_p": 0.95},
        {"top_k": 50, "top_p": 0.9},
        {"top_k": 2_000},
        {"min_p": 0.02},
        {"temperature": 1.5, "top_k": 1_500, "top_p": 0.6, "min_p": 0.01},
    ],
    ids=lambda params: "-".join(params) or "plain",
)
def test_frequencies_follow_the_reference_in_large_vocabularies(vocabulary: int, params: dict[str, object]) -> None:
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(4)) * 3
    assert_frequencies(logits, 15_000, params)


@pytest.mark.parametrize("vocabulary", [5_000, 5_120])
def test_a_row_draws_the_same_token_alone_and_in_any_batch(vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 40
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(5)) * 3
    kinds: list[dict[str, object]] = [
        {"temperature": 0.0},
        {},
        {"top_p": 0.9},
        {"top_p": 0.1, "temperature": 3.0},
        {"top_k": 40},
        {"top_k": 1_100, "top_p": 0.95},
        {"min_p": 0.1, "logit_bias": ((7, 9.0), (8, -9.0))},
        {"repetition_penalty": 1.5, "frequency_penalty": 1.0},
        {"temperature": 0.0, "presence_penalty": 1.0, "logprobs": 3},
    ]
    given = [spec(seed=i, index=2 * i, **kinds[i % len(kinds)]) for i in range(rows)]
    specs = [replace(s, key=i, tokens=[*range(3 * i + 5)], prompt_tokens=i + 5) for i, s in enumerate(given)]
    together = sample(logits, specs)
    assert together == tuple(sample(logits[i : i + 1], specs[i : i + 1])[0] for i in range(rows))
    order = list(reversed(range(rows)))
    assert together == sample(logits[order], [specs[i] for i in order])[::-1]
    monkeypatch.setattr(parameters, "PIECE_LOGITS", {"cpu": 3 * vocabulary})
    assert together == sample(logits, specs)


def test_a_sampler_that_goes_on_gives_what_a_fresh_one_gives() -> None:
    """Rows join, leave, change places and reach their `min_tokens`; nothing of an earlier batch stays behind."""
    chance = random.Random(6)
    logits = torch.randn(12, VOCABULARY, generator=torch.Generator().manual_seed(6)) * 3
    kinds: list[dict[str, object]] = [{"temperature": 0.0}, {"top_p": 0.9}, {"frequency_penalty": 2.0}, {"top_k": 5}]
    held = [SamplingParams(max_tokens=9, **kinds[i % 4]) for i in range(12)]  # type: ignore[arg-type]
    outputs: list[list[int]] = [[] for _ in held]
    sampler = Sampler(VOCABULARY, logits.device)
    rows = list(range(6))
    for _ in range(60):
        if chance.random() < 0.3:
            rows = chance.sample(range(12), chance.randrange(1, 9))
        specs = [
            SampleSpec(held[i], i, 0, len(outputs[i]), (3, 5) if len(outputs[i]) < 4 else (), None, i, outputs[i], 0)
            for i in rows
        ]
        results = sampler.sample(logits[rows], specs)
        assert results == sample(logits[rows], specs)
        for i, result in zip(rows, results, strict=True):
            outputs[i].append(result.token_id)


def test_greedy_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(3, VOCABULARY)
    logits[1, [7, 30, 59]] = 4.0
    logits[2] = -math.inf
    logits[2, [58, 59]] = -1.0
    assert tokens(logits, [spec(temperature=0.0)] * 3) == [0, 7, 58]


def test_ties_at_the_edge_of_top_k_stay_in_together() -> None:
    logits = torch.zeros(200, 4)
    logits[:, 0] = 1.0
    seen = set(tokens(logits, [spec(index=i, top_k=2) for i in range(200)]))
    assert seen == {0, 1, 2, 3}


def test_banned_ids_never_come_and_the_logits_stay_as_they_were() -> None:
    logits = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(8))
    before = logits.clone()
    best = int(logits[0].argmax())
    specs = [spec(temperature=0.0, banned=(best, VOCABULARY + 5)), spec(top_k=1, banned=(int(logits[1].argmax()),))]
    second = [int(row.topk(2).indices[1]) for row in logits]
    assert tokens(logits, specs) == second
    assert torch.equal(logits, before)


def test_a_bias_of_100_is_a_command_and_of_minus_100_a_ban() -> None:
    logits = torch.randn(60, VOCABULARY, generator=torch.Generator().manual_seed(8))
    best = int(logits[0].argmax())
    for temperature in (0.0, 1.0):
        commanded = [spec(index=i, temperature=temperature, logit_bias=((41, 100.0),)) for i in range(60)]
        assert tokens(logits, commanded) == [41] * 60
        banned = [spec(index=i, temperature=temperature, logit_bias=((best, -100.0),)) for i in range(60)]
        assert best not in tokens(logits[:1].expand(60, -1), banned)


def test_a_bias_lifts_no_ban_and_counts_each_time_it_is_named() -> None:
    logits = torch.zeros(2, VOCABULARY)
    both = spec(temperature=0.0, banned=(9,), logit_bias=((9, 100.0), (8, 0.5), (VOCABULARY + 7, 100.0)))
    twice = spec(temperature=0.0, logit_bias=((5, 1.0), (6, 1.5), (5, 1.0)))
    assert tokens(logits, [both, twice]) == [8, 5]


def test_the_smallest_temperature_is_greedy_and_finite() -> None:
    logits = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(9)) * 50
    assert tokens(logits, [spec(temperature=1e-300, index=i) for i in range(4)]) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("bad", [math.nan, math.inf, "all -inf"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_unusable_logits_fail_their_own_row_only(bad: float | str, temperature: float) -> None:
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(10))
    specs = [spec(index=i, temperature=temperature, top_p=0.9) for i in range(3)]
    healthy = tokens(logits, specs)
    if isinstance(bad, str):
        logits[1] = -math.inf
    else:
        logits[1, 17] = bad
    results = sample(logits, specs)
    assert [results[0].token_id, results[2].token_id] == [healthy[0], healthy[2]]
    assert "not numbers" in results[1].fault
    assert not results[0].fault
    assert not results[2].fault


def test_banning_everything_is_a_fault_not_a_token() -> None:
    banned = tuple(range(VOCABULARY))
    assert sample(torch.zeros(1, VOCABULARY), [spec(temperature=0.0, banned=banned)])[0].fault


def test_bfloat16_logits_are_sampled_as_their_exact_values() -> None:
    logits = torch.randn(30, VOCABULARY, generator=torch.Generator().manual_seed(12)).bfloat16()
    specs = [spec(index=i, top_p=0.95) for i in range(30)]
    assert tokens(logits, specs) == tokens(logits.float(), specs)


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.zeros(0, VOCABULARY), []) == ()
