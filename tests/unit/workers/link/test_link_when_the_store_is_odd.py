"""A store that has lost its end twice, that fences in between, or that does not answer while the link stops."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest

from headrace.frame import Frame, Part
from headrace.store.interface import Reported
from headrace.store.keys import incarnation
from headrace.store.twin import Twin
from headrace.store.twin_store import SyncTwinStore
from tests.fixtures.scripted_runner import ScriptedRunner, bind, make_config, make_request
from workers.engine import Engine
from workers.link import STOP_S, Link

TAKEN = Reported(fenced=False, resend=(), dropped=(), claimed=0, now_ms=1)
LOST_END = replace(TAKEN, resend=(("a", 0, 0),))


@dataclass
class Rig:
    """A link whose threads are not started, over a store that replies as the test says."""

    link: Link
    engine: Engine
    report: SyncTwinStore
    sent: list[tuple[str, Frame]] = field(default_factory=list)
    released: list[tuple[str, int]] = field(default_factory=list)

    def replies(self, *replies: Reported) -> None:
        left = iter(replies)

        def report(worker: str, frame: Frame) -> Reported:
            self.sent.append((worker, frame))
            return next(left)

        def release(_: str, request_id: str, epoch: int, *, only_if_room_elsewhere: bool = False) -> bool:
            self.released.append((request_id, epoch))
            return True

        self.report.report = report  # type: ignore[method-assign]
        self.report.release = release  # type: ignore[method-assign]

    def holds(self) -> bool:
        """Whether the engine still has the request, as of its next iteration."""
        self.engine.step()
        return self.engine.load().running == 1


@pytest.fixture
def rig() -> Rig:
    twin = Twin("cluster", "scripted", lambda: 1)
    engine = Engine(ScriptedRunner(64, 4), make_config(), None)
    report = SyncTwinStore(twin)
    engine.add(bind(make_request("a", 5, 50, ignore_eos=True)))
    return Rig(Link(engine, report, SyncTwinStore(twin), lambda: incarnation("worker")), engine, report)


def frames(rig: Rig) -> Frame:
    """Two iterations; the first frame is kept as acknowledged, the second is about to be sent."""
    first, second = rig.engine.step(), rig.engine.step()
    assert first is not None
    assert second is not None
    rig.link._keep(first)
    return second


def test_what_was_lost_is_sent_again_in_one_part(rig: Rig) -> None:
    frame = frames(rig)
    rig.replies(LOST_END, TAKEN)
    assert rig.link._report(frame)
    [part] = rig.sent[1][1].parts
    assert (part.first_index, len(part.token_ids)) == (0, 2)
    assert rig.sent[1][1].load.seq > rig.sent[0][1].load.seq
    assert rig.holds()
    assert rig.released == []


def test_a_fence_between_the_two_is_heard(rig: Rig) -> None:
    frame, before = frames(rig), rig.link.incarnation
    rig.replies(LOST_END, replace(TAKEN, fenced=True))
    assert not rig.link._report(frame), "the frame is void and must not be kept for a later repair"
    assert rig.link.incarnation != before
    assert not rig.holds()


def test_a_request_that_ended_between_the_two_is_forgotten(rig: Rig) -> None:
    frame = frames(rig)
    rig.replies(LOST_END, replace(TAKEN, dropped=("a",)))
    assert rig.link._report(frame)
    assert not rig.holds()


def test_a_store_that_loses_its_end_twice_gets_the_request_back(rig: Rig) -> None:
    """Were it ignored, a request whose last part this is would never end."""
    frame = frames(rig)
    rig.replies(LOST_END, LOST_END)
    assert rig.link._report(frame)
    assert len(rig.sent) == 2
    assert rig.released == [("a", 1)]
    assert not rig.holds()


def test_a_gap_that_cannot_be_filled_is_handed_back(rig: Rig) -> None:
    rig.replies(LOST_END)
    assert rig.link._report(Frame(rig.engine.load(), (Part("a", 0, 1, 9, (9,)),), "0-0"))
    assert rig.released == [("a", 1)]


@pytest.fixture
def never() -> Iterator[Callable[..., Reported]]:
    """A call that hangs until the test is over, as on a network that swallows packets."""
    over = threading.Event()

    def hang(*_: object) -> Reported:
        over.wait(30)
        return TAKEN

    yield hang
    over.set()


def test_stopping_does_not_wait_for_a_store_that_is_away(
    rig: Rig, never: Callable[..., Reported], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("report", "leave"):
        monkeypatch.setattr(rig.report, name, never)
    monkeypatch.setattr(rig.link._inbox_store, "inbox", never)
    rig.link._joined.set()
    rig.link.start()
    began_s = time.monotonic()
    rig.link.stop(timeout_s=0.5)
    assert time.monotonic() - began_s < 1.5
    assert STOP_S <= 8
