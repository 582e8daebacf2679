"""Queue time in an engine: every moment from the inbox to the start is some reason's, and they add up."""

from __future__ import annotations

import pytest

from tests.fixtures.scripted_runner import ScriptedRunner, bind, make_config, make_request
from workers.engine import Engine


class Clock:
    """Stands still but for what a test says."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def test_a_wait_is_told_by_its_reasons_and_they_sum_to_it() -> None:
    clock = Clock()
    engine = Engine(ScriptedRunner(100, 4), make_config(max_sequences=1), None, clock)
    engine.add(bind(make_request("first", 4, 3, ignore_eos=True)))
    engine.step()  # it starts at once
    engine.add(bind(make_request("second", 4, 1, ignore_eos=True)))
    clock.now += 0.25  # until the iteration's end
    for seconds in (0.5, 0.25):  # while the first one holds the only slot
        engine.step()
        clock.now += seconds
    engine.step()
    assert engine.load().waited_s_by_reason == (("slots", 0.75), ("boundary", 0.25))
    assert engine.load().waiting == 0


@pytest.mark.parametrize("ending", ["cancel", "reset"])
def test_what_never_starts_has_waited_to_its_end(ending: str) -> None:
    clock = Clock()
    engine = Engine(ScriptedRunner(100, 4), make_config(max_sequences=1), None, clock)
    engine.add(bind(make_request("first", 4, 30, ignore_eos=True)))
    engine.add(bind(make_request("second", 4, 1, ignore_eos=True)))
    engine.step()
    clock.now += 2.0
    engine.cancel("second", "2-0") if ending == "cancel" else engine.reset()
    engine.step()
    assert engine.load().waited_s_by_reason == (("slots", 2.0),)
