"""The step-time model: what it learns, what it forgets, and how large a chunk it allows."""

from __future__ import annotations

import random

import pytest

from workers.scheduler.step_time import EMPTY_PASS, Features, StepTime, pass_of, piece

TRUE = Features(2e-3, 40e-6, 100e-6, 20e-9, 1e-9)
"""A machine: seconds per unit of each feature."""


def duration(features: Features) -> float:
    return sum(c * x for c, x in zip(TRUE, features, strict=True))


def random_pass(dice: random.Random, *, prefills: bool = True) -> Features:
    decodes = [(dice.randrange(4_000), 1) for _ in range(dice.randrange(1, 65))]
    chunks = [(dice.randrange(4_000), dice.randrange(2, 512)) for _ in range(dice.randrange(0, 3))] if prefills else []
    return pass_of(decodes + chunks)


def trained(passes: int, *, noise: float = 0.0, seed: int = 1) -> StepTime:
    dice, model = random.Random(seed), StepTime()
    for _ in range(passes):
        features = random_pass(dice)
        model.measured(features, duration(features) * (1 + dice.uniform(-noise, noise)))
    return model


def test_a_pass_is_the_sum_of_its_pieces() -> None:
    total = EMPTY_PASS
    for start, count in ((0, 7), (100, 1), (50, 30), (3, 1)):
        total = total.plus(piece(start, count))
    assert total == pass_of(((0, 7), (100, 1), (50, 30), (3, 1)))
    assert total == Features(1.0, 37.0, 2.0, 105.0, 28.0 + 50 * 30 + 465)


def test_before_anything_is_measured_nothing_is_known() -> None:
    model = StepTime()
    assert not model.is_fitted
    assert model.predict_s(piece(0, 500)) == 0.0
    assert model.largest_chunk(0.001, EMPTY_PASS, 0, 512) == 512


def test_exact_measurements_give_the_machine_back() -> None:
    model = trained(200)
    for found, true in zip(model.coefficients, TRUE, strict=True):
        assert found == pytest.approx(true, rel=0.02)
    assert model.margin < 1.1


def test_noisy_measurements_give_predictions_within_a_few_percent() -> None:
    dice, model = random.Random(9), trained(600, noise=0.2)
    errors = []
    for _ in range(50):
        features = random_pass(dice)
        errors.append(abs(model.predict_s(features) / duration(features) - 1))
    assert sorted(errors)[45] < 0.1
    assert 1.05 < model.margin < 1.4, "nine of ten passes lie within the margin of ±20 % noise"


def test_a_slower_machine_is_noticed_within_a_hundred_passes() -> None:
    dice, model = random.Random(4), trained(300)
    for _ in range(100):
        features = random_pass(dice)
        model.measured(features, 3 * duration(features))
    probe = random_pass(dice)
    assert model.predict_s(probe) == pytest.approx(3 * duration(probe), rel=0.25)


def test_a_long_run_of_decodes_does_not_forget_what_a_prefill_costs() -> None:
    dice, model = random.Random(5), trained(300)
    before = model.predict_s(piece(0, 256))
    for _ in range(5_000):
        features = random_pass(dice, prefills=False)
        model.measured(features, duration(features))
    assert model.predict_s(piece(0, 256)) == pytest.approx(before, rel=0.05)
    model.measured(pass_of([(0, 256)]), 10 * duration(pass_of([(0, 256)])))
    assert model.predict_s(piece(0, 256)) < 3 * before, "nor does one odd pass overthrow it"


def test_one_pass_that_the_host_held_up_moves_little() -> None:
    model, probe = trained(300), pass_of([(100, 1)] * 16)
    before = model.predict_s(probe)
    model.measured(probe, 100 * before)
    assert model.predict_s(probe) < 1.5 * before


@pytest.mark.parametrize("seed", range(5))
def test_no_coefficient_is_ever_negative(seed: int) -> None:
    dice, model = random.Random(seed), StepTime()
    for _ in range(300):
        features = random_pass(dice)
        model.measured(features, dice.choice((1e-4, 1e-2, 1.0)))
        assert min(model.coefficients) >= 0.0
        assert model.margin >= 1.0


def test_the_largest_chunk_is_the_largest() -> None:
    model = trained(300)
    decodes = pass_of([(200, 1)] * 20)
    for slack_s in (0.008, 0.015, 0.03):
        for start in (0, 3_000):
            count = model.largest_chunk(slack_s, decodes, start, 2_048)
            assert 1 < count < 2_048
            assert model.predict_s(decodes.plus(piece(start, count))) * model.margin <= slack_s
            assert model.predict_s(decodes.plus(piece(start, count + 1))) * model.margin > slack_s


def test_no_chunk_fits_where_the_decodes_alone_are_too_long() -> None:
    model = trained(300)
    assert model.largest_chunk(0.001, pass_of([(200, 1)] * 20), 0, 512) == 0
    assert model.largest_chunk(-1.0, EMPTY_PASS, 0, 512) == 0
    assert model.largest_chunk(60.0, EMPTY_PASS, 0, 512) == 512


def test_a_model_of_given_coefficients_predicts_with_them() -> None:
    model = StepTime.of(TRUE, margin=1.2)
    assert model.is_fitted
    assert model.margin == 1.2
    assert model.predict_s(piece(10, 100)) == pytest.approx(duration(piece(10, 100)))
    assert model.recompute_s(0) == 0.0
    assert model.recompute_s(400) == pytest.approx(duration(piece(0, 400)))
    assert model.recompute_s(400, behind=1_000) == pytest.approx(duration(piece(1_000, 400)))
