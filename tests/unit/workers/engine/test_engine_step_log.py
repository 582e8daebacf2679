"""A run that is recorded can be planned again, step by step, from the file alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fixtures.scripted_runner import Client, ScriptedRunner, Ticks, bind, make_config, make_request
from workers.engine import Engine
from workers.scheduler.capacity import capacity_names
from workers.scheduler.policy import policy_names
from workers.scheduler.state import Limits, SchedulerState
from workers.scheduler.step_log import StepLog, replay


def recorded(folder: Path, **config: object) -> list[str]:
    """The log of a run in which blocks are short, prefixes are shared and somebody is preempted or waits."""
    clock = Ticks()
    engine = Engine(
        ScriptedRunner(24, 4, max_context=64),
        make_config(step_log=str(folder), chunk_tokens=16, itl_target_s=0.002, **config),
        None,
        clock,
    )
    for i in range(6):
        engine.add(bind(make_request(f"r{i}", 3 + 5 * i, 20, band=i % 3, n=1 + i % 2), inbox_id=f"1-{i}"))
    engine.cancel("r1", "2-0")
    client, finished = Client(), 5 + 3 - 1
    while len(client.finishes) < finished:
        client.take(engine.step())
        clock.now += 0.01  # so that what a policy holds back goes on
        assert clock.now < 100.0, f"only {client.finishes} ended"
    engine.start()
    assert engine.stop(10.0)
    (path,) = folder.iterdir()
    return path.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("policy", policy_names())
@pytest.mark.parametrize("capacity", capacity_names())
def test_every_plan_of_a_recorded_run_is_made_again(policy: str, capacity: str, tmp_path: Path) -> None:
    lines = recorded(tmp_path, policy=policy, capacity=capacity)
    header, plans = json.loads(lines[0]), list(replay(lines))
    assert (header["policy"], header["capacity"]) == (policy, capacity)
    assert sum(bool(plan["work"]) for plan, _ in plans) > 20
    assert any(plan["waits"] for plan, _ in plans)
    for number, (then, now) in enumerate(plans):
        assert now == then, f"plan {number}"


def test_a_plan_can_be_made_again_without_those_before_it(tmp_path: Path) -> None:
    header, *plans = recorded(tmp_path)
    middle = plans[len(plans) // 2 :]
    assert len(middle) > 10
    assert all(then == now for then, now in replay([header, *middle]))


def test_other_limits_give_other_plans(tmp_path: Path) -> None:
    """The comparison can fail: half the tokens in a step would have cut the prompts elsewhere."""
    header, *plans = recorded(tmp_path)
    smaller = header.replace('"chunk_tokens": 16', '"chunk_tokens": 8')
    assert smaller != header
    assert any(then != now for then, now in replay([smaller, *plans]))


def test_a_folder_that_cannot_be_written_is_told_and_harms_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(ScriptedRunner(8, 4), make_config(step_log=str(tmp_path / "missing")), None, Ticks())
    engine.start()
    assert engine.stop(10.0)
    assert "the step log cannot be written" in caplog.text


def test_the_log_is_a_ring() -> None:
    limits = Limits(chunk_tokens=16, max_sequences=4, total_blocks=8, block_size=4)
    log, state = StepLog("chunked", "over-commit", limits, most_plans=3), SchedulerState(limits)
    for now in range(5):
        log.plan(state, float(now))
    _, *kept = log.lines()
    assert [json.loads(line)["now"] for line in kept] == [2.0, 3.0, 4.0]
