"""The engine's own thread: it sleeps without work, pauses when nobody takes its frames, forgets all when fenced, and
ends when told.
"""

from __future__ import annotations

import threading

import pytest

from headrace.frame import FinishReason, Frame
from tests.fixtures.scripted_runner import Client, ScriptedRunner, bind, make_config, make_request, solo_output
from workers.engine import Engine
from workers.mailbox import FRAMES_SPAN_S, Add, Mailbox, Reset
from workers.model.interface import Sampled, SequenceSlice

WAIT_S = 10.0


class ManualClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Gate:
    """Holds the device in its nth pass until told to go on."""

    def __init__(self, at_pass: int) -> None:
        self._at_pass = at_pass
        self.inside, self.go_on = threading.Event(), threading.Event()

    def __call__(self, number: int, _piece: SequenceSlice, sampled: Sampled) -> Sampled:
        if number == self._at_pass:
            self.inside.set()
            assert self.go_on.wait(WAIT_S)
        return sampled


def test_requests_added_from_other_threads_all_get_their_solo_answers() -> None:
    engine = Engine(ScriptedRunner(96, 4), make_config(chunk_tokens=24), None)
    requests = [make_request(f"r{i}", 3 + i % 9, 15) for i in range(40)]
    client = Client()
    engine.start()
    adders = [
        threading.Thread(target=lambda part=part: [engine.add(bind(request)) for request in part])
        for part in (requests[::2], requests[1::2])
    ]
    for thread in adders:
        thread.start()
    while len(client.finishes) < len(requests):
        frame = engine.next_frame(WAIT_S)
        assert frame is not None
        client.take(frame)
    for thread in adders:
        thread.join(WAIT_S)
    assert engine.alive
    assert engine.stop(WAIT_S)
    assert not engine.alive
    for request in requests:
        assert client.answer(request.id) == solo_output(request)
    engine.check()


def test_frames_come_in_order_and_an_idle_engine_makes_none() -> None:
    engine = Engine(ScriptedRunner(16, 4), make_config(), None)
    engine.start()
    engine.add(bind(make_request("r", 3, 5, ignore_eos=True), inbox_id="1-1"))
    numbers = []
    while True:
        frame = engine.next_frame(WAIT_S)
        assert frame is not None
        numbers.append(frame.load.seq)
        if any(part.finish for part in frame.parts):
            break
    assert numbers == sorted(numbers)
    iterations = engine.load().iterations
    assert engine.next_frame(0.05) is None
    engine.seen("1-2")
    frame = engine.next_frame(WAIT_S)
    assert frame is not None
    assert (frame.last_inbox_id, frame.parts, frame.load.iterations) == ("1-2", (), iterations)
    assert engine.oldest_runnable_age_s() == engine.step_age_s() == 0.0
    assert engine.stop(WAIT_S)


def test_ages_grow_while_a_pass_hangs() -> None:
    clock, gate = ManualClock(), Gate(at_pass=2)
    engine = Engine(ScriptedRunner(16, 4, disturb=gate), make_config(), None, clock)
    engine.start()
    engine.add(bind(make_request("r", 3, 5, ignore_eos=True)))
    assert gate.inside.wait(WAIT_S)
    clock.now += 7.0
    assert engine.step_age_s() == 7.0
    assert engine.oldest_runnable_age_s() == 7.0
    assert not engine.stop(0.01), "a hung pass cannot be ended"
    gate.go_on.set()
    assert engine.stop(WAIT_S)
    assert engine.step_age_s() == 0.0


def test_the_engine_pauses_while_ten_seconds_of_frames_wait_and_that_is_no_fault_of_its_health() -> None:
    clock = ManualClock()
    passed = threading.Semaphore(0)
    ages: list[float] = []

    def slow_device(_number: int, _piece: SequenceSlice, sampled: Sampled) -> Sampled:
        ages.append(engine.oldest_runnable_age_s())
        clock.now += FRAMES_SPAN_S / 4
        passed.release()
        return sampled

    runner = ScriptedRunner(16, 4, disturb=slow_device)
    engine = Engine(runner, make_config(), None, clock)
    engine.start()
    engine.add(bind(make_request("r", 3, 40, ignore_eos=True)))
    for _ in range(4):
        assert passed.acquire(timeout=WAIT_S)
    while passed.acquire(timeout=0.2):  # whatever it still does before it pauses
        pass
    paused_at = len(runner.passes)
    assert paused_at <= 6
    clock.now += 60.0
    assert engine.oldest_runnable_age_s() == 0.0
    assert engine.step_age_s() == 0.0
    assert engine.next_frame(WAIT_S) is not None
    assert engine.next_frame(WAIT_S) is not None
    assert passed.acquire(timeout=WAIT_S), "room again: it goes on"
    assert max(ages) <= FRAMES_SPAN_S / 4, "nor does the pause count once it is over"
    engine.cancel("r", "2-0")
    client_parts = []
    while True:
        frame = engine.next_frame(WAIT_S)
        assert frame is not None
        client_parts += frame.parts
        if any(part.finish is FinishReason.CANCELLED for part in frame.parts):
            break
    assert engine.stop(WAIT_S)


def test_a_paused_engine_can_be_stopped() -> None:
    clock = ManualClock()

    def slow_device(_number: int, _piece: SequenceSlice, sampled: Sampled) -> Sampled:
        clock.now += FRAMES_SPAN_S
        return sampled

    engine = Engine(ScriptedRunner(16, 4, disturb=slow_device), make_config(), None, clock)
    engine.add(bind(make_request("r", 3, 40, ignore_eos=True)))
    engine.start()
    while engine.load().iterations < 2:
        assert engine.alive
    assert engine.stop(WAIT_S)


def test_reset_drops_requests_unsent_frames_and_the_pass_under_way() -> None:
    gate = Gate(at_pass=3)
    engine = Engine(ScriptedRunner(64, 4, disturb=gate), make_config(), None)
    engine.start()
    engine.add(bind(make_request("old", 3, 40, ignore_eos=True), inbox_id="5-0"))
    assert gate.inside.wait(WAIT_S)
    engine.reset()
    fresh = make_request("new", 4, 6)
    engine.add(bind(fresh, inbox_id="6-0"))
    gate.go_on.set()
    client, frames = Client(), []
    while ("new", 0) not in client.finishes:
        frame = engine.next_frame(WAIT_S)
        assert frame is not None
        frames.append(frame)
        client.take(frame)
    assert {part.request_id for frame in frames for part in frame.parts} == {"new"}
    assert client.answer("new") == solo_output(fresh)
    assert {frame.last_inbox_id for frame in frames} == {"6-0"}
    assert engine.stop(WAIT_S)
    engine.check()


def test_the_loop_ends_with_a_bug_of_ours_and_shows_it(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(ScriptedRunner(16, 4), make_config(), None)
    engine.start()
    engine.add(None)  # type: ignore[arg-type]
    thread = next(each for each in threading.enumerate() if each.name == "engine")
    thread.join(WAIT_S)
    assert not engine.alive
    assert "the engine's loop ended" in caplog.text


def test_a_frame_of_before_the_reset_is_not_published() -> None:
    box = Mailbox(ManualClock())
    engine = Engine(ScriptedRunner(16, 4), make_config(), None)
    frame = Frame(engine.load(), (), "1-0")
    _, resets = box.take()
    box.publish(frame, resets)
    box.post(Add(bind(make_request("r", 1, 1)), 0.0))
    box.reset()
    box.publish(frame, resets)
    assert box.next_frame(0.0) is None
    commands, resets = box.take()
    assert commands == (Reset(),)
    box.publish(frame, resets)
    assert box.next_frame(0.0) is frame
