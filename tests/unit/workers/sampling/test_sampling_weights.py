"""Weights: near exp, exact in their sums, and picked in the order of ids."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from workers.sampling.scratch import Scratch
from workers.sampling.weights import block_sums, pick, weigh

SCRATCH = Scratch(torch.device("cpu"))


@pytest.mark.parametrize("vocabulary", [1, 97, 5_000, 1 << 18])
def test_weights_are_exp_on_a_grid_that_float64_adds_up_exactly(vocabulary: int) -> None:
    distances = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(1)).abs_() * -6
    distances[0, 0] = 0.0
    exact = distances.double().exp()
    weights = weigh(distances)
    assert weights[0, 0] == 1.0
    assert torch.allclose(weights.double(), exact, rtol=2e-7, atol=2.0**-35)
    total = float(block_sums(weights, SCRATCH).sum())
    assert Fraction(total) == sum(map(Fraction, weights[0].tolist()))
    assert total == float(weights[0, torch.randperm(vocabulary)].double().sum())


def test_even_the_heaviest_row_of_a_large_vocabulary_is_exact() -> None:
    weights = weigh(torch.full((1, 1 << 18), -1e-7))
    assert Fraction(float(block_sums(weights, SCRATCH).sum())) == (1 << 18) * Fraction(float(weights[0, 0]))


def test_what_is_far_below_the_peak_weighs_nothing() -> None:
    assert weigh(torch.tensor([[0.0, -30.0, -90.0, -1e30, -math.inf]])).tolist() == [[1.0, 0.0, 0.0, 0.0, 0.0]]


def test_noise_picks_in_the_order_of_ids_and_never_what_weighs_nothing() -> None:
    weights = torch.zeros(1, 700)
    weights[0, [3, 200, 650]] = torch.tensor([1.0, 0.5, 0.5])
    noises = [0.0, 0.25, math.nextafter(0.5, 0), 0.5, 0.74, 0.75, math.nextafter(1.0, 0)]
    rows = weights.expand(len(noises), -1)
    picked = pick(rows, block_sums(rows, SCRATCH), torch.tensor(noises, dtype=torch.float64)[:, None])
    assert picked.tolist() == [3, 3, 3, 200, 200, 650, 650]
