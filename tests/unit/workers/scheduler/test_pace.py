"""Due times of tokens, and what a step leaves to prefills because of them."""

from __future__ import annotations

import pytest

from tests.unit.workers.scheduler.test_policies import decoding, sequence, shares, state
from workers.scheduler.pace import LEAST_SHARE, MOST_AHEAD, next_due_s
from workers.scheduler.policy import make_policy
from workers.scheduler.state import SchedulerState
from workers.scheduler.step_time import Features, StepTime, pass_of

MACHINE = Features(passes=0.004, prefill_tokens=50e-6, decode_rows=100e-6)
"""4 ms a pass, 50 µs a prefill token, 100 µs a decode."""


def beside_a_decode(due_s: float | None, *, prompt: int = 1_000, cap: int = 512) -> SchedulerState:
    talking = decoding("talking", 0, known=5, held=2)
    talking.due_s = due_s
    given = state([talking], [sequence("reading", 1, prompt=prompt)], tokens=cap, blocks=1_000)
    given.step_time = StepTime.of(MACHINE)
    return given


def test_tokens_are_due_one_itl_after_the_other() -> None:
    assert next_due_s(None, 10.0, 0.05) == pytest.approx(10.05)
    assert next_due_s(10.05, 10.05, 0.05) == pytest.approx(10.10), "in time: the schedule goes on"


def test_earliness_is_carried_on_up_to_its_bound() -> None:
    due_s, now = None, 10.0
    for _ in range(10):
        due_s = next_due_s(due_s, now, 0.05)
        now += 0.04
    assert due_s is not None
    assert due_s == pytest.approx(now - 0.04 + MOST_AHEAD * 0.05, abs=0.051)
    assert due_s - (now - 0.04) > 0.05, "nine times 10 ms early, and not more than one ITL of it is kept"


def test_lateness_is_not_carried_on() -> None:
    assert next_due_s(10.0, 12.0, 0.05) == pytest.approx(12.05)


def test_a_chunk_is_as_long_as_the_slack_of_the_tightest_allows() -> None:
    given = beside_a_decode(100.02003)
    plan = make_policy("chunked").plan(given, 100.0)
    assert shares(plan) == {"talking": 1, "reading": 318}, "20 ms less 4.1 ms at 50 µs a token"
    assert given.step_time.predict_s(plan.features) <= 0.02003
    hurried = decoding("hurried", 2, known=5, held=2)
    hurried.due_s = 100.01003
    given.running.append(hurried)
    assert shares(make_policy("chunked").plan(given, 100.0))["reading"] == 116, "10 ms less 4.2 ms"


def test_the_static_cap_stays_a_cap() -> None:
    assert shares(make_policy("chunked").plan(beside_a_decode(107.0), 100.0))["reading"] == 511


def test_without_due_times_only_the_static_cap_counts() -> None:
    assert shares(make_policy("chunked").plan(beside_a_decode(None), 100.0))["reading"] == 511


def test_before_a_pass_was_measured_only_the_static_cap_counts() -> None:
    given = beside_a_decode(100.020)
    given.step_time = StepTime()
    assert shares(make_policy("chunked").plan(given, 100.0))["reading"] == 511


@pytest.mark.parametrize(("cap", "least"), [(512, 32), (64, LEAST_SHARE), (8, 7)])
def test_however_late_the_decodes_are_prompts_make_progress(cap: int, least: int) -> None:
    assert shares(make_policy("chunked").plan(beside_a_decode(90.0, cap=cap), 100.0))["reading"] == least


def test_a_chunk_deep_in_a_long_context_is_shorter() -> None:
    given = beside_a_decode(100.020)
    given.step_time = StepTime.of(MACHINE._replace(attended_pairs=10e-9))
    shallow = shares(make_policy("chunked").plan(given, 100.0))["reading"]
    reading = sequence("reading", 1, prompt=9_000, computed=8_000, held=2_250)
    given.running.append(reading)
    given.waiting.clear()
    deep = shares(make_policy("chunked").plan(given, 100.0))["reading"]
    assert LEAST_SHARE < deep < shallow
    assert given.step_time.predict_s(pass_of([(4, 1), (8_000, deep)])) <= 0.020


def test_a_replayed_prefill_is_not_held_up_by_its_own_lateness() -> None:
    replayed = sequence("replayed", 0, prompt=100, output=5, held=27)
    replayed.due_s = 90.0
    given = state([replayed], [], tokens=512, blocks=1_000)
    given.step_time = StepTime.of(MACHINE)
    assert shares(make_policy("chunked").plan(given, 100.0)) == {"replayed": 105}


def test_whole_prefills_are_never_cut_but_fewer_join() -> None:
    given = beside_a_decode(100.020, prompt=200)
    given.waiting.append(sequence("second", 2, prompt=200))
    assert shares(make_policy("continuous").plan(given, 100.0)) == {"talking": 1, "reading": 200}
    given.running[0].due_s = 107.0
    assert shares(make_policy("continuous").plan(given, 100.0)) == {"talking": 1, "reading": 200, "second": 200}
