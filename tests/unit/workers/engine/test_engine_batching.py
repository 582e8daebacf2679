"""The four policies on one engine: equal answers, counted waste, and an engine that sleeps while work is held back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.frame import Frame
from tests.fixtures.scripted_runner import Client, ScriptedRunner, Ticks, bind, make_config, make_request, solo_output
from workers.engine import Engine
from workers.scheduler.batching import Static
from workers.scheduler.policy import policy_names
from workers.scheduler.state import SchedulerState, StepPlan

WAIT_S = 10.0


class CountedStatic(Static):
    def __init__(self, wait_s: float) -> None:
        super().__init__(wait_s)
        self.plans = 0

    def plan(self, state: SchedulerState, now: float) -> StepPlan:
        self.plans += 1
        return super().plan(state, now)


def engine_with(policy: Static, monkeypatch: pytest.MonkeyPatch, **config: object) -> Engine:
    monkeypatch.setattr("workers.engine.make_policy", lambda _: policy)
    return Engine(ScriptedRunner(64, 4), make_config(**config), None)


def next_frame(engine: Engine) -> Frame:
    frame = engine.next_frame(WAIT_S)
    assert frame is not None
    return frame


def run_until(engine: Engine, client: Client, answers: int) -> None:
    for _ in range(5_000):
        client.take(engine.step())
        engine.check()
        if len(client.finishes) == answers:
            return
    raise AssertionError(f"{len(client.finishes)} of {answers} ended")


@pytest.mark.parametrize("blocks", [200, 14])
def test_all_policies_give_the_same_answers_with_room_and_without(blocks: int) -> None:
    requests = [make_request(f"r{i}", 2 + 5 * i % 17, 4 + 7 * i % 31, n=1 + i % 2) for i in range(12)]
    preemptions = {}
    for policy in policy_names():
        engine = Engine(ScriptedRunner(blocks, 4), make_config(policy=policy, chunk_tokens=8), None, Ticks())
        client = Client()
        for i, request in enumerate(requests):
            engine.add(bind(request))
            if i % 4 == 3:
                client.take(engine.step())
        run_until(engine, client, sum(request.n for request in requests))
        preemptions[policy] = engine.load().preemptions_total
        for request in requests:
            for choice in range(request.n):
                assert client.answer(request.id, choice) == solo_output(request, choice), policy
    assert all(preemptions.values()) == (blocks == 14), preemptions


def test_slot_steps_and_rows_are_counted_exactly() -> None:
    """Three slots of 4, 1 and 1 tokens; prompts of 2, 5 and 3."""
    lengths = ((2, 4), (5, 1), (3, 1))
    counted = {}
    for policy in policy_names():
        engine = Engine(ScriptedRunner(64, 4), make_config(policy=policy, max_sequences=3), None, Ticks())
        client = Client()
        for i, (prompt, output) in enumerate(lengths):
            engine.add(bind(make_request(f"r{i}", prompt, output, ignore_eos=True)))
        run_until(engine, client, 3)
        load = engine.load()
        counted[policy] = (
            load.slot_steps_total,
            load.slot_steps_wasted_total,
            load.rows_total,
            load.padding_rows_total,
        )
    rows = 2 + 5 + 3 + 3
    padded = (12, 6, rows, 3 + 2 + 3 * 2)
    assert counted == {"chunked": (6, 0, rows, 0), "continuous": (6, 0, rows, 0), "dynamic": padded, "static": padded}


def test_padding_is_computed_on_the_scratch_block_for_every_idle_slot() -> None:
    runner = ScriptedRunner(64, 4)
    engine = Engine(runner, make_config(policy="static", max_sequences=2), None, Ticks())
    client = Client()
    for request_id, prompt, output in (("long", 9, 3), ("short", 4, 1)):
        engine.add(bind(make_request(request_id, prompt, output, ignore_eos=True)))
    run_until(engine, client, 2)
    shapes = [[(len(piece.token_ids), piece.block_ids[0] == 64) for piece in slices] for slices in runner.passes]
    assert shapes == [[(9, False), (4, False), (5, True)], [(1, False), (1, True)], [(1, False), (1, True)]]


def test_equal_prompts_go_together_although_one_could_wait_for_the_other_s_prefix() -> None:
    runner = ScriptedRunner(64, 4)
    engine = Engine(runner, make_config(policy="static", max_sequences=2, prefix_cache=True), None, Ticks())
    first = make_request("first", 9, 3, ignore_eos=True)
    twin = replace(first, id="twin")
    client = Client()
    for request in (first, twin):
        engine.add(bind(request))
    run_until(engine, client, 2)
    assert [len(piece.token_ids) for piece in runner.passes[0]] == [9, 9]
    assert client.answer("twin") == client.answer("first") == solo_output(first)


def test_while_a_batch_is_collected_the_engine_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = CountedStatic(0.2)
    engine = engine_with(policy, monkeypatch)
    request = make_request("r", 3, 4, ignore_eos=True)
    engine.start()
    engine.add(bind(request))
    held = next_frame(engine)
    assert (held.load.running, held.load.waiting, held.load.waiting_by_reason) == (0, 1, (("batch", 1),))
    assert engine.oldest_runnable_age_s() == 0.0, "what is held back on purpose is not late"
    client = Client()
    while not client.finishes:
        client.take(next_frame(engine))
    assert engine.stop(WAIT_S)
    assert client.answer("r") == solo_output(request)
    assert policy.plans <= 1 + 4 + 2, "one when it came, one for each token, one or two for the wake"


def test_an_arrival_that_fills_the_batch_wakes_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_with(CountedStatic(3_600.0), monkeypatch, max_sequences=2)
    engine.start()
    engine.add(bind(make_request("a", 3, 2, ignore_eos=True)))
    assert next_frame(engine).load.waiting == 1
    engine.add(bind(make_request("b", 3, 2, ignore_eos=True)))
    client = Client()
    while len(client.finishes) < 2:
        client.take(next_frame(engine))
    assert engine.stop(WAIT_S)


def test_a_sleeping_engine_can_be_stopped_and_a_held_request_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_with(CountedStatic(3_600.0), monkeypatch)
    engine.start()
    for request_id in ("gone", "kept"):
        engine.add(bind(make_request(request_id, 3, 2)))
    engine.cancel("gone", "2-0")
    client = Client()
    while not client.finishes:
        client.take(next_frame(engine))
    assert list(client.finishes) == [("gone", 0)]
    assert engine.stop(WAIT_S)
    assert engine.load().waiting == 1


def test_what_is_held_for_its_batch_is_not_offered_elsewhere_until_its_time_out_ends() -> None:
    clock = Ticks()
    engine = Engine(ScriptedRunner(64, 4), make_config(policy="static", max_sequences=2), None, clock)
    for request_id in ("a", "b"):
        engine.add(bind(make_request(request_id, 3, 40, ignore_eos=True)))
    engine.step()
    engine.add(bind(make_request("late", 3, 4), epoch=3))
    for _ in range(5):
        engine.step()
        assert engine.unstarted() == ()
    clock.now += 0.5
    engine.step()
    assert engine.unstarted() == (("late", 3),)


def test_an_ended_member_that_comes_again_waits_for_the_next_batch() -> None:
    engine = Engine(ScriptedRunner(64, 4), make_config(policy="static", max_sequences=2), None, Ticks())
    for request_id in ("a", "b"):
        engine.add(bind(make_request(request_id, 3, 9, ignore_eos=True)))
    engine.step()
    engine.add(bind(make_request("b", 3, 9, ignore_eos=True), epoch=2))
    frame = engine.step()
    assert frame is not None
    assert [part.request_id for part in frame.parts] == ["a"]
    assert frame.load.waiting_by_reason == (("batch", 1),)
