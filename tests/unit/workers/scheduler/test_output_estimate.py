"""How many tokens are still to come, as learned from what finished."""

from __future__ import annotations

from workers.scheduler.estimate import DEFAULT_TOKENS, OutputEstimate
from workers.scheduler.sequence import Sequence, SequenceKey


def sequence(max_tokens: int, produced: int = 0, *, runs_to_the_end: bool = False) -> Sequence:
    return Sequence(SequenceKey("r", 0), 0, 0, 10, max_tokens, runs_to_the_end, known=10 + produced)


def test_before_any_data_it_is_max_tokens_bounded_by_the_default() -> None:
    estimate = OutputEstimate()
    assert estimate.remaining(sequence(40)) == 40
    assert estimate.remaining(sequence(10_000)) == DEFAULT_TOKENS
    assert estimate.remaining(sequence(10_000, produced=1_000)) == 500


def test_a_request_that_only_its_limit_can_end_is_known_exactly() -> None:
    estimate = OutputEstimate()
    estimate.finished(5)
    assert estimate.remaining(sequence(900, produced=100, runs_to_the_end=True)) == 800


def test_it_follows_the_lengths_that_finish() -> None:
    estimate = OutputEstimate()
    for _ in range(50):
        estimate.finished(20)
    assert 20 <= estimate.remaining(sequence(1_000)) <= 24
    for _ in range(600):
        estimate.finished(400)
    assert 400 <= estimate.remaining(sequence(1_000)) <= 480


def test_it_is_conditional_on_what_was_already_produced() -> None:
    estimate = OutputEstimate()
    for length in (10, 10, 10, 300, 10, 10, 10, 300):
        estimate.finished(length)
    assert 250 <= 50 + estimate.remaining(sequence(1_000, produced=50)) <= 360
    assert 0 < estimate.remaining(sequence(1_000, produced=600)) <= 400


def test_it_is_never_below_one_nor_above_what_max_tokens_leaves() -> None:
    estimate = OutputEstimate()
    estimate.finished(3)
    assert estimate.remaining(sequence(10, produced=9)) == 1
    assert estimate.remaining(sequence(10, produced=10)) == 1
    for _ in range(20):
        estimate.preempted()
        assert estimate.remaining(sequence(50, produced=20)) <= 30


def test_preemption_raises_it_and_finishing_calms_it() -> None:
    estimate = OutputEstimate()
    for _ in range(50):
        estimate.finished(20)
    calm = estimate.remaining(sequence(1_000))
    estimate.preempted()
    estimate.preempted()
    alarmed = estimate.remaining(sequence(1_000))
    assert alarmed > calm + 400
    for _ in range(100):
        estimate.finished(20)
    assert estimate.remaining(sequence(1_000)) <= calm + 15


def test_weights_stay_finite_over_a_long_life() -> None:
    estimate = OutputEstimate()
    for _ in range(20_000):
        estimate.finished(30)
    assert 30 <= estimate.remaining(sequence(1_000)) <= 36
