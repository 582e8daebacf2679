"""The sampler against a float64 reference written independently, row by row."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from headrace.sampling import SamplingParams
from workers.model.interface import Sampled, SampleSpec
from workers.sampling.sampler import Sampler

VOCABULARY = 60


def sample(logits: Tensor, specs: list[SampleSpec]) -> tuple[Sampled, ...]:
    return Sampler(logits.shape[1], logits.device).sample(logits, specs)


def spec(seed: int = 0, index: int = 0, banned: tuple[int, ...] = (), **params: float) -> SampleSpec:
    settings = {"temperature": 1.0} | params
    return SampleSpec(SamplingParams(max_tokens=1, **settings).validated(), seed, 0, index, banned)  # type: ignore[arg-type]


def tokens(logits: Tensor, specs: list[SampleSpec]) -> list[int]:
    results = sample(logits, specs)
    assert not any(result.fault for result in results)
    return [result.token_id for result in results]


def reference_probabilities(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """Temperature, then top-k, then top-p, in plain Python floats; ties at an edge stay in together."""
    peak = max(logits)
    weights = [math.exp((x - peak) / temperature) for x in logits]
    if top_k:
        edge = sorted(weights, reverse=True)[min(top_k, len(weights)) - 1]
        weights = [w if w >= edge else 0.0 for w in weights]
    if top_p < 1.0:
        reached, total, edge = 0.0, math.fsum(weights), 0.0
        for weight in sorted(weights, reverse=True):
            reached, edge = reached + weight, weight
            if reached >= top_p * total:
                break
        weights = [w if w >= edge else 0.0 for w in weights]
    total = math.fsum(weights)
    return [w / total for w in weights]


def chi_square_limit(degrees: int) -> float:
    """What a chi-square variable exceeds with probability 1e-4 (Wilson and Hilferty's approximation)."""
    z = 3.719
    return degrees * (1 - 2 / (9 * degrees) + z * math.sqrt(2 / (9 * degrees))) ** 3


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.5, 0, 1.0), (2.0, 12, 1.0), (1.0, 0, 0.8), (1.3, 20, 0.7), (1.0, 1, 1.0), (1.0, 0, 1e-6)],
)
def test_frequencies_follow_the_reference(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(3)) * 2
    expected = reference_probabilities(logits.tolist(), temperature, top_k, top_p)
    draws = 20_000
    counts = [0] * VOCABULARY
    for first in range(0, draws, 2_000):
        specs = [
            spec(seed=11, index=first + i, temperature=temperature, top_k=top_k, top_p=top_p) for i in range(2_000)
        ]
        for token in tokens(logits.expand(2_000, -1), specs):
            counts[token] += 1
    assert all(count == 0 for count, p in zip(counts, expected, strict=True) if p == 0.0)
    # Rare ids are pooled, as the statistic needs about five expected hits per cell.
    cells = [(c, p * draws) for c, p in zip(counts, expected, strict=True) if p * draws >= 5]
    rest = (sum(counts) - sum(c for c, _ in cells), draws - sum(e for _, e in cells))
    cells += [rest] if rest[1] >= 5 else []
    statistic = sum((c - e) ** 2 / e for c, e in cells)
    assert statistic <= chi_square_limit(max(len(cells) - 1, 1))


def test_a_row_draws_the_same_token_alone_and_in_any_batch() -> None:
    logits = torch.randn(24, 5_000, generator=torch.Generator().manual_seed(5)) * 3
    kinds = [{"temperature": 0.0}, {"temperature": 1.0}, {"top_p": 0.9}, {"top_k": 40}, {"top_k": 900, "top_p": 0.95}]
    specs = [spec(seed=i, index=2 * i, **kinds[i % len(kinds)]) for i in range(24)]
    together = tokens(logits, specs)
    assert together == [tokens(logits[i : i + 1], specs[i : i + 1])[0] for i in range(24)]
    order = list(reversed(range(24)))
    assert together == tokens(logits[order], [specs[i] for i in order])[::-1]


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
