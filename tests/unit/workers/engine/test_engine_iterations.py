"""The loop, one iteration at a time: what is counted here are iterations, never seconds."""

from __future__ import annotations

import pytest

from headrace.frame import FinishReason, Frame
from tests.fixtures.scripted_runner import Client, ScriptedRunner, Ticks, bind, make_config, make_request, solo_output
from workers.engine import Engine
from workers.model.interface import Sampled
from workers.scheduler.draft import MAX_OVERTAKES


def run_dry(engine: Engine, client: Client, limit: int = 5_000) -> int:
    """Steps until nothing is left; returns how many iterations that took."""
    for count in range(limit):
        frame = engine.step()
        client.take(frame)
        engine.check()
        if frame is None:
            return count
    raise AssertionError(f"still running after {limit} iterations: {engine.load()}")


def request_ids(frame: Frame | None) -> set[str]:
    return {part.request_id for part in frame.parts} if frame else set()


@pytest.mark.parametrize("policy", ["chunked", "continuous"])
def test_a_short_request_beside_long_ones_takes_as_many_iterations_as_tokens(policy: str) -> None:
    runner = ScriptedRunner(600, 16)
    engine = Engine(runner, make_config(policy=policy, block_size=16, chunk_tokens=512), None, Ticks())
    for i in range(3):
        engine.add(bind(make_request(f"long{i}", 40, 2_000, ignore_eos=True)))
    for _ in range(5):
        engine.step()
    engine.add(bind(make_request("short", 10, 20, ignore_eos=True)))
    client, iterations = Client(), 0
    while ("short", 0) not in client.finishes:
        frame = engine.step()
        iterations += 1
        for part in frame.parts if frame else ():
            if part.request_id == "short":
                client.take(Frame(frame.load, (part,), frame.last_inbox_id))
        assert request_ids(frame) >= {"long0", "long1", "long2"}, "the long ones go on in every iteration"
    assert len(client.answer("short")[0]) == 20
    assert iterations == 20, "the prefill samples the first token, 19 decodes the others"


def test_a_long_prompt_never_holds_up_a_decode() -> None:
    runner = ScriptedRunner(200, 16)
    engine = Engine(runner, make_config(block_size=16, chunk_tokens=64), None, Ticks())
    engine.add(bind(make_request("talking", 5, 200, ignore_eos=True)))
    engine.step()
    engine.add(bind(make_request("reading", 1_000, 4, ignore_eos=True)))
    frames = [engine.step() for _ in range(16)]
    assert all("talking" in request_ids(frame) for frame in frames)
    assert [i for i, frame in enumerate(frames) if "reading" in request_ids(frame)] == [15], "63 of 1000 tokens a step"
    assert max(sum(len(piece.token_ids) for piece in each) for each in runner.passes) == 64


def test_a_small_pool_preempts_and_slows_but_changes_no_answer() -> None:
    runner = ScriptedRunner(16, 4)
    engine = Engine(runner, make_config(chunk_tokens=32), None, Ticks())
    requests = [make_request(f"r{i}", 6 + i, 40) for i in range(8)]
    for request in requests:
        engine.add(bind(request))
    client = Client()
    for _ in range(40):  # early stops teach the estimate that outputs are short, so it over-commits
        engine.add(bind(make_request(f"quick{_}", 2, 2, ignore_eos=True)))
    run_dry(engine, client)
    assert engine.load().preemptions_total > 0
    for request in requests:
        assert client.answer(request.id) == solo_output(request)
    assert engine.load().held_blocks == 0


def test_a_preempted_request_comes_back_before_later_arrivals() -> None:
    runner = ScriptedRunner(6, 4, disturb=lambda _pass, _piece, _sampled: Sampled(5))
    engine = Engine(runner, make_config(), None, Ticks())
    client = Client()
    for i in range(20):  # what finishes after one token teaches the estimate to over-commit
        engine.add(bind(make_request(f"quick{i}", 1, 1)))
    run_dry(engine, client)
    for name in ("first", "second"):
        engine.add(bind(make_request(name, 8, 12)))
    engine.add(bind(make_request("third", 12, 12)))
    client.take(engine.step())
    assert (engine.load().running, engine.load().waiting) == (2, 1), "three more blocks are not there"
    while engine.load().preemptions_total == 0:
        client.take(engine.step())
    assert (engine.load().running, engine.load().waiting) == (1, 2)
    assert engine.load().waiting_by_reason == (("blocks", 2),)
    run_dry(engine, client)
    assert list(client.finishes)[-3:] == [("first", 0), ("second", 0), ("third", 0)]
    assert all(client.answer(name) == ((5,) * 12, FinishReason.LENGTH) for name in ("first", "second", "third"))


def test_a_blocked_request_is_overtaken_only_so_often() -> None:
    runner = ScriptedRunner(60, 4)
    engine = Engine(runner, make_config(max_sequences=4), None, Ticks())
    engine.add(bind(make_request("long", 4, 200, ignore_eos=True)))
    engine.add(bind(make_request("head", 100, 100, ignore_eos=True)))
    for i in range(MAX_OVERTAKES * 2):
        engine.add(bind(make_request(f"quick{i}", 1, 2, ignore_eos=True)))
    client = Client()
    while ("head", 0) not in client.tokens:
        client.take(engine.step())
    assert set(client.finishes) - {("long", 0)} == {(f"quick{i}", 0) for i in range(MAX_OVERTAKES)}
    run_dry(engine, client)
    assert set(client.finishes.values()) == {FinishReason.LENGTH}


def test_what_cannot_start_is_named_after_two_iterations_and_only_while_it_waits() -> None:
    engine = Engine(ScriptedRunner(20, 4, max_context=80), make_config(block_size=4), None, Ticks())
    engine.add(bind(make_request("hog", 20, 50, ignore_eos=True)))
    engine.step()
    engine.add(bind(make_request("late", 20, 40, ignore_eos=True), epoch=3))
    engine.step()
    assert engine.unstarted() == (), "it has waited for one iteration"
    engine.step()
    engine.step()
    assert engine.unstarted() == (("late", 3),)
    engine.cancel("hog", "9-0")
    engine.step()
    assert engine.load().running == 1
    assert engine.unstarted() == ()


def test_a_cancel_read_at_a_boundary_is_in_no_later_plan() -> None:
    runner = ScriptedRunner(64, 4)
    engine = Engine(runner, make_config(), None, Ticks())
    for name in ("stays", "goes"):
        engine.add(bind(make_request(name, 5, 50, ignore_eos=True)))
    engine.step()
    engine.step()
    engine.cancel("goes", "9-0")
    frame = engine.step()
    assert frame is not None
    ended = [part for part in frame.parts if part.request_id == "goes"]
    assert [(part.finish, part.token_ids, part.first_index) for part in ended] == [(FinishReason.CANCELLED, (), 2)]
    assert len(runner.passes[-1]) == 1
    assert frame.last_inbox_id == "9-0"
    assert frame.load.running == 1
    engine.cancel("goes", "9-1")
    assert request_ids(engine.step()) == {"stays"}, "a second cancel of it changes nothing"


def test_a_cancel_during_a_forward_pass_costs_no_further_iteration() -> None:
    runner = ScriptedRunner(64, 4)
    engine = Engine(runner, make_config(), None, Ticks())
    runner_forward = runner.forward

    def forward_and_cancel(slices, moves):  # the cancel arrives while the device computes
        if len(runner.passes) == 2:
            engine.cancel("r", "5-0")
        return runner_forward(slices, moves)

    runner.forward = forward_and_cancel
    engine.add(bind(make_request("r", 5, 50, ignore_eos=True)))
    client = Client()
    while engine.load().running or not client.tokens:
        client.take(engine.step())
    assert len(runner.passes) == 3, "the pass under way is the last"
    assert client.finishes == {("r", 0): FinishReason.CANCELLED}


def test_a_waiting_request_is_cancelled_before_it_ever_ran() -> None:
    runner = ScriptedRunner(64, 4)
    engine = Engine(runner, make_config(max_sequences=1), None, Ticks())
    engine.add(bind(make_request("runs", 5, 50, ignore_eos=True)))
    engine.add(bind(make_request("waits", 5, 50)))
    assert engine.step().load.waiting_by_reason == (("slots", 1),)
    engine.cancel("waits", "2-0")
    frame = engine.step()
    assert [part.finish for part in frame.parts if part.request_id == "waits"] == [FinishReason.CANCELLED]
    assert all(piece.sample.params.max_tokens == 50 for each in runner.passes for piece in each)
    assert all(len(each) == 1 for each in runner.passes)


def test_choices_of_one_request_run_as_sequences_of_their_own() -> None:
    runner = ScriptedRunner(64, 4)
    engine = Engine(runner, make_config(), None, Ticks())
    request = make_request("n3", 5, 12, n=3)
    engine.add(bind(request))
    client = Client()
    run_dry(engine, client)
    answers = [client.answer("n3", choice) for choice in range(3)]
    assert answers == [solo_output(request, choice) for choice in range(3)]
    assert len(set(answers)) == 3


def test_the_load_report_tells_the_truth_of_the_iteration() -> None:
    runner = ScriptedRunner(64, 4)
    engine = Engine(runner, make_config(chunk_tokens=8), None, Ticks())
    idle = engine.load()
    assert (idle.credit_blocks, idle.free_blocks, idle.total_blocks, idle.free_slots) == (64, 64, 64, 256)
    engine.add(bind(make_request("r", 12, 4, ignore_eos=True), inbox_id="3-1"))
    first, second = engine.step(), engine.step()
    assert first.last_inbox_id == second.last_inbox_id == "3-1"
    assert (first.load.uncomputed_tokens, second.load.uncomputed_tokens) == (4, 0)
    assert (first.load.prompt_tokens_total, second.load.prompt_tokens_total) == (8, 12)
    assert (first.load.output_tokens_total, second.load.output_tokens_total) == (0, 1)
    assert second.load.held_blocks == 3
    assert second.load.credit_blocks == 60, "16 known tokens at the end, the last of which is never read"
    assert second.load.iterations == 2
    assert second.load.step_s > 0
    assert second.load.drain_tokens_per_s > 0
    assert second.load.seq > first.load.seq > idle.seq
    beat = engine.beat()
    assert (beat.parts, beat.last_inbox_id, beat.load.seq) == ((), "3-1", second.load.seq + 1)


def test_replayed_prompt_tokens_are_counted_once() -> None:
    runner = ScriptedRunner(8, 4)
    engine = Engine(runner, make_config(), None, Ticks())
    for i in range(30):
        engine.add(bind(make_request(f"teach{i}", 1, 1, stop_token_ids=(1,))))
    requests = [make_request(f"r{i}", 8, 16) for i in range(3)]
    for request in requests:
        engine.add(bind(request))
    run_dry(engine, Client())
    assert engine.load().preemptions_total > 0
    assert engine.load().prompt_tokens_total == 30 + 3 * 8


def test_draining_gives_no_credit_and_finishes_what_it_holds() -> None:
    runner = ScriptedRunner(64, 4)
    engine = Engine(runner, make_config(), None, Ticks())
    request = make_request("r", 5, 6)
    engine.add(bind(request))
    engine.drain()
    frame = engine.step()
    assert (frame.load.draining, frame.load.credit_blocks) == (True, 0)
    client = Client()
    client.take(frame)
    run_dry(engine, client)
    assert client.answer("r") == solo_output(request)
