"""The link between a real engine and the store's twin: everything arrives once and in order, whatever happens."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import pytest

from headrace.frame import Frame, Part
from headrace.request import Request
from headrace.sampling import SamplingParams
from headrace.store.interface import Admit, Admitted, State
from headrace.store.keys import incarnation
from headrace.store.twin import Twin
from headrace.store.twin_store import SyncTwinStore, TwinStore
from tests.fixtures.scripted_runner import ScriptedRunner, make_config
from workers.engine import Engine
from workers.kv.moves import Move
from workers.link import MIN_STEP_LIMIT_S, STEP_LIMIT_FACTOR, Link
from workers.model.interface import Computed, SequenceSlice
from workers.scheduler.step_time import Features, StepTime

ROUTER = "router~test"
DEADLINE_S = 20.0
PASSES_A_LOOK = 4


def wall_ms() -> int:
    return int(time.monotonic() * 1000)


class PacedRunner(ScriptedRunner):
    """Once paced, computes only as many passes as the test lets it: on a fast machine a request would otherwise end
    before the test has looked.
    """

    paced = False

    def __init__(self) -> None:
        super().__init__(128, 16, max_context=1024)
        self._allowed = threading.Semaphore(0)

    def allow(self, passes: int) -> None:
        self._allowed.release(passes)

    def forward(self, slices: Sequence[SequenceSlice], moves: Sequence[Move] = ()) -> tuple[Computed, ...]:
        while self.paced and not self._allowed.acquire(timeout=0.05):
            pass
        return super().forward(slices, moves)


@dataclass
class Rig:
    runner: PacedRunner
    twin: Twin
    engine: Engine
    link: Link
    report: SyncTwinStore
    inbox: SyncTwinStore

    def router(self) -> TwinStore:
        return TwinStore(self.twin)

    def admit(self, request_id: str, max_tokens: int) -> Admitted:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=1, ignore_eos=True)
        request = Request(request_id, "scripted", (3, 1, 4, 1, 5), params)
        call = Admit(request, ROUTER, (self.link.incarnation,), price_blocks=2)
        reply = asyncio.run(self.router().admit(call))
        assert isinstance(reply, Admitted), reply
        return reply

    def state(self, request_id: str) -> State:
        status = asyncio.run(self.router().status(request_id))
        assert status is not None
        return status.state

    def journal(self, request_id: str) -> tuple[int, ...]:
        return asyncio.run(self.router().journal(request_id, 0, 0))

    def wait(self, holds: Callable[[], bool]) -> None:
        """Wakes with every change of the twin. Bounded."""
        deadline = time.monotonic() + DEADLINE_S
        while not holds():
            assert time.monotonic() < deadline, "what was waited for did not come"
            self.runner.allow(PASSES_A_LOOK)
            with self.twin.changed:
                self.twin.changed.wait(0.05)


@pytest.fixture
def rig() -> Iterator[Rig]:
    twin = Twin("cluster", "scripted", wall_ms)
    runner = PacedRunner()
    engine = Engine(runner, make_config(block_size=16), None)
    report, inbox = SyncTwinStore(twin), SyncTwinStore(twin)
    link = Link(engine, report, inbox, lambda: incarnation("worker"))
    asyncio.run(TwinStore(twin).sweep(ROUTER))
    engine.start()
    link.start()
    assert link.wait_joined(DEADLINE_S)
    yield Rig(runner, twin, engine, link, report, inbox)
    runner.paced = False
    link.stop()
    assert engine.stop(5.0)


def test_a_bound_request_runs_and_is_journaled(rig: Rig) -> None:
    assert rig.admit("a", 20).worker == rig.link.incarnation
    rig.wait(lambda: rig.state("a") is State.FINISHED)
    assert len(rig.journal("a")) == 20


def test_frames_wait_while_the_store_is_away(rig: Rig) -> None:
    rig.admit("first", 12)
    rig.wait(lambda: rig.state("first") is State.FINISHED)
    rig.runner.paced = True
    rig.admit("b", 300)
    rig.wait(lambda: len(rig.journal("b")) >= 2)
    rig.report.away = True
    behind = len(rig.journal("b"))
    rig.wait(lambda: rig.engine.load().output_tokens_total >= 12 + behind + 50)
    assert len(rig.journal("b")) == behind, "the engine went on, the journal did not"
    rig.report.away = False
    rig.wait(lambda: rig.state("b") is State.FINISHED)
    assert len(rig.journal("b")) == 300
    assert len(rig.journal("first")) == 12


def test_a_lost_reply_is_harmless(rig: Rig) -> None:
    """The store took the frame, the link never heard: it sends again, and no token is there twice."""
    from headrace.errors import Unavailable

    taken, real = [0], rig.report.report

    def every_third_reply_is_lost(worker: str, frame: Frame) -> object:
        reply = real(worker, frame)
        taken[0] += 1
        if taken[0] % 3 == 0:
            raise Unavailable("the reply was lost")
        return reply

    rig.report.report = every_third_reply_is_lost  # type: ignore[method-assign, assignment]
    rig.admit("c", 30)
    rig.wait(lambda: rig.state("c") is State.FINISHED)
    rig.report.report = real  # type: ignore[method-assign]
    rig.admit("d", 30)
    rig.wait(lambda: rig.state("d") is State.FINISHED)
    assert len(rig.journal("c")) == 30
    assert rig.journal("c") == rig.journal("d"), "the same prompt gives the same tokens"


def test_a_fenced_worker_rejoins_empty_as_a_new_incarnation(rig: Rig) -> None:
    old = rig.link.incarnation
    rig.runner.paced = True
    rig.admit("e", 400)
    rig.wait(lambda: len(rig.journal("e")) >= 2)
    SyncTwinStore(rig.twin).report(incarnation("worker"), replace(rig.engine.beat(), last_inbox_id="0-0"))
    rig.wait(lambda: rig.link.incarnation != old)
    rig.wait(lambda: rig.engine.load().running == 0 or rig.state("e") is State.FINISHED)


def test_a_cancel_reaches_the_engine(rig: Rig) -> None:
    rig.runner.paced = True
    rig.admit("f", 400)
    rig.wait(lambda: len(rig.journal("f")) >= 1)
    asyncio.run(rig.router().cancel("f"))
    rig.wait(lambda: rig.state("f") is State.CANCELLED)
    rig.wait(lambda: rig.engine.load().held_blocks == 0)


def lease_left_ms(rig: Rig) -> int:
    rows = asyncio.run(rig.router().board())
    return max((row.lease_left_ms for row in rows), default=0)


def test_an_engine_whose_loop_has_ended_loses_its_lease(rig: Rig) -> None:
    """Else work would be bound to it that nobody computes."""
    assert lease_left_ms(rig) > 0
    rig.engine.stop(5.0)
    rig.wait(lambda: lease_left_ms(rig) == 0)


def test_a_step_that_was_predicted_to_be_long_keeps_the_lease_longer(rig: Rig) -> None:
    """As whole prefills and padded batches are: many times the longest pass of the warm-up."""
    assert rig.link.step_limit_s == MIN_STEP_LIMIT_S
    rig.engine._roster.state.step_time = StepTime.of(Features(passes=2.0))
    rig.admit("a", 1)
    rig.wait(lambda: rig.state("a") is State.FINISHED)
    assert rig.link.step_limit_s == STEP_LIMIT_FACTOR * 2.0


def test_a_worker_that_cannot_read_its_inbox_loses_its_lease(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("an entry nobody can read")

    assert rig.link.alive
    monkeypatch.setattr(rig.inbox, "inbox", fail)
    rig.wait(lambda: lease_left_ms(rig) == 0)
    assert not rig.link.alive


def test_work_that_cannot_start_here_moves_to_a_worker_with_room(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.runner.paced = True
    rig.admit("late", 900)
    monkeypatch.setattr(rig.engine, "unstarted", lambda: (("late", 1),))
    other, beat = incarnation("other"), rig.engine.beat()
    room = replace(beat, load=replace(beat.load, credit_blocks=64, seq=1), last_inbox_id="0-0")
    SyncTwinStore(rig.twin).report(other, room)
    rig.wait(lambda: bool(SyncTwinStore(rig.twin).inbox(other, "0-0", 0)))
    moved = SyncTwinStore(rig.twin).inbox(other, "0-0", 0)[0]
    assert (moved.request_id, moved.epoch) == ("late", 2)
    rig.wait(lambda: rig.engine.beat().load.running == 0)


def test_a_record_that_cannot_be_read_fails_alone(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a request of a later release's layout would be: it is told so, and the inbox goes on."""
    monkeypatch.setattr("headrace.store.calls.encode_request", lambda _: b"\x81\xa1v\x63")
    rig.admit("odd", 5)
    rig.wait(lambda: rig.state("odd") is State.FAILED)
    status = asyncio.run(rig.router().status("odd"))
    assert status is not None
    assert "layout 99" in status.detail
    monkeypatch.undo()
    rig.admit("good", 5)
    rig.wait(lambda: rig.state("good") is State.FINISHED)
    assert rig.link.alive


def test_leaving_gives_the_work_back(rig: Rig) -> None:
    rig.runner.paced = True
    rig.admit("g", 400)
    rig.wait(lambda: len(rig.journal("g")) >= 1)
    rig.link.stop()
    assert rig.state("g") in (State.QUEUED, State.FINISHED)


def test_a_journal_that_lost_its_end_is_rebuilt_from_frames_kept(rig: Rig) -> None:
    kept = [Part("h", 0, 1, first, tuple(range(first, first + 3))) for first in (0, 3, 6)]
    load = rig.engine.load()
    link = rig.link
    for part in kept[:2]:
        link._keep(Frame(load, (part,), "0-0"))
    rebuilt = link._rebuild(Frame(load, (kept[2],), "0-0"), "h", 0, 2)
    assert rebuilt == Part("h", 0, 1, 2, (2, 3, 4, 5, 6, 7, 8))
    assert link._rebuild(Frame(load, (Part("i", 0, 1, 9, (9,)),), "0-0"), "i", 0, 2) is None


def test_threads_end_with_stop(rig: Rig) -> None:
    rig.link.stop()
    assert not [t for t in threading.enumerate() if t.name.startswith("link-") and t.is_alive()]
