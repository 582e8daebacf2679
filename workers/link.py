"""The link between one engine and the store: frames out, inbox in, lease kept (DESIGN section 4).

Two threads, neither of which computes. The *reporting* thread takes the engine's frames in order and makes one
`report` each; when there is none for `BEAT_S` it sends a beat. It takes the next frame only when the last is
acknowledged, so while Redis is away frames wait in the engine's bounded outbox and the engine pauses at its bound. The
*inbox* thread blocks on the worker's inbox and hands bound requests and cancels to the engine, which reads them at its
next iteration boundary.

The lease is renewed while all loops live and the running step is younger than the step limit: a long chunk keeps it, a
hung kernel or an ended loop loses it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from headrace.errors import HeadraceError, Unavailable
from headrace.frame import Frame, Part
from headrace.logprobs import UNTOLD, TokenLogprob
from headrace.request import BoundRequest
from headrace.store.interface import InboxEntry, Reported, State, SyncStore

logger = logging.getLogger(__name__)

BEAT_S = 0.5
"""Longest silence of a healthy worker; a sixth of the lease."""
INBOX_BLOCK_MS = 500
RETRY_FIRST_S, RETRY_MOST_S = 0.05, 1.0
KEEP_ACKNOWLEDGED_S = 5.0
"""How long acknowledged frames are kept for a store that lost its end."""
MIN_STEP_LIMIT_S = 3.0
STEP_LIMIT_FACTOR = 5.0
"""A step may take so many times what was predicted, or what the warm-up's longest took."""
OFFERS_AT_ONCE = 8
STOP_S = 6.0


Place = tuple[str, int, int]
"""request id, choice, token index"""


class EnginePort(Protocol):
    """What the link needs of an engine. Every call is thread-safe and returns at once, `next_frame` in its time-out."""

    def next_frame(self, timeout_s: float) -> Frame | None: ...
    def beat(self) -> Frame:
        """A frame without parts that carries the current load."""
        ...

    def add(self, bound: BoundRequest) -> None: ...
    def cancel(self, request_id: str, inbox_id: str) -> None: ...
    def seen(self, inbox_id: str) -> None: ...
    def forget(self, request_id: str, epoch: int | None = None) -> None:
        """Drops a request that is no longer this worker's, without a word; with `epoch`, only that binding of it."""
        ...

    def reset(self) -> None:
        """Drops every request and every unsent frame: the incarnation was fenced."""
        ...

    def drain(self) -> None: ...
    def unstarted(self) -> tuple[tuple[str, int], ...]:
        """(request id, epoch) of bound work that could not be started within two iterations."""
        ...

    @property
    def alive(self) -> bool:
        """False once the engine's loop has ended: nothing will be computed any more."""
        ...

    def step_age_s(self) -> float: ...
    def step_expected_s(self) -> float: ...


class Link:
    """Runs the two threads from `start` to `stop`. `new_incarnation` names each life of the worker: one per fencing."""

    def __init__(
        self,
        engine: EnginePort,
        report_store: SyncStore,
        inbox_store: SyncStore,
        new_incarnation: Callable[[], str],
        *,
        step_limit_s: float = MIN_STEP_LIMIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._report_store = report_store
        self._inbox_store = inbox_store
        self._new_incarnation = new_incarnation
        self._step_limit_s = max(MIN_STEP_LIMIT_S, step_limit_s)
        self._clock = clock
        self._incarnation = new_incarnation()
        self._seq = 0
        self._acknowledged: deque[tuple[float, Frame]] = deque()
        self._joined = threading.Event()
        self._offered_back_s = -BEAT_S
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    @property
    def incarnation(self) -> str:
        return self._incarnation

    @property
    def alive(self) -> bool:
        """False once a thread has ended before `stop`: a bug of ours."""
        return all(thread.is_alive() for thread in self._threads)

    @property
    def step_limit_s(self) -> float:
        """A step older than this loses the lease: one that has been predicted to be long may be older."""
        return max(self._step_limit_s, STEP_LIMIT_FACTOR * self._engine.step_expected_s())

    def start(self) -> None:
        loops = (("link-inbox", self._inbox_loop), ("link-report", self._report_loop))
        self._threads = [
            threading.Thread(target=self._run, args=(loop,), name=name, daemon=True) for name, loop in loops
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except Exception:
            logger.exception("a loop of the link ended")

    def wait_joined(self, timeout_s: float) -> bool:
        """True once the store has accepted this incarnation's first report."""
        return self._joined.wait(timeout_s)

    def stop(self, timeout_s: float = STOP_S) -> None:
        """Ends both threads and the lease; what is still held is re-queued by the store at once.

        Returns within `timeout_s` also while the store is away; then the lease lapses by itself.
        """
        began_s = time.monotonic()
        self._stopping.set()
        for thread in self._threads:
            thread.join(max(0.0, began_s + timeout_s / 2 - time.monotonic()))
        leaving = threading.Thread(target=self._leave, name="link-leave", daemon=True)
        leaving.start()
        leaving.join(max(0.0, began_s + timeout_s - time.monotonic()))
        self._report_store.close()
        self._inbox_store.close()

    def _leave(self) -> None:
        try:
            self._report_store.leave(self._incarnation)
        except HeadraceError as error:
            logger.warning("could not leave the board: %s", error)

    # ---- frames out ------------------------------------------------------------------------------------------------

    def _report_loop(self) -> None:
        while not self._stopping.is_set():
            frame = self._engine.next_frame(BEAT_S if self._joined.is_set() else 0.0)
            if frame is None:
                if reason := self._reason_to_lapse():
                    logger.error("%s: the lease is left to lapse", reason)
                    self._stopping.wait(BEAT_S)
                    continue
                frame = self._engine.beat()
            self._deliver(frame)
            self._hand_back_unstarted()

    def _reason_to_lapse(self) -> str:
        """ "" while a beat would be true: whoever renews the lease says that work bound here will be done."""
        if not self._engine.alive:
            return "the engine's loop has ended"
        if not self.alive:
            return "the inbox is read no more"
        if self._engine.step_age_s() > (limit_s := self.step_limit_s):
            return f"step older than its limit of {limit_s:.1f} s"
        return ""

    def _deliver(self, frame: Frame) -> None:
        """Sends one frame until the store has answered; only then may the next one go, so order is kept."""
        retry_s = RETRY_FIRST_S
        while not self._stopping.is_set():
            try:
                if not self._report(frame):
                    return
            except Unavailable as error:
                logger.warning("store away, frame kept: %s", error)
            else:
                self._keep(frame)
                return
            self._stopping.wait(retry_s)
            retry_s = min(RETRY_MOST_S, retry_s * 2)

    def _report(self, frame: Frame) -> bool:
        """One call, and one more for what the store has lost. False when the frame is void: we were fenced."""
        reply = self._send(frame)
        if reply is None or not reply.resend:
            return reply is not None
        wanted = (*reply.resend, *self._ends_lost_with(frame, reply.resend))
        rebuilt = {one: self._rebuild(frame, *one) for one in wanted}
        self._hand_back(frame, [one[0] for one, part in rebuilt.items() if part is None])
        missing = tuple(part for part in rebuilt.values() if part is not None)
        if not missing:
            return True
        reply = self._send(replace(frame, parts=missing))
        if reply is None:
            return False
        self._hand_back(frame, [request_id for request_id, _, _ in reply.resend])
        return True

    def _send(self, frame: Frame) -> Reported | None:
        """The store's reply, what it dropped forgotten; None when it fenced us, and we go on as somebody new."""
        self._seq += 1
        stamped = replace(frame, load=replace(frame.load, seq=self._seq))
        reply = self._report_store.report(self._incarnation, stamped)
        if reply.fenced:
            self._rejoin()
            return None
        self._joined.set()
        epochs = {part.request_id: part.epoch for part in frame.parts}
        for request_id in reply.dropped:
            self._engine.forget(request_id, epochs.get(request_id))
        return reply

    def _hand_back(self, frame: Frame, request_ids: list[str]) -> None:
        """For journals whose lost end is no longer known here: whoever gets them next goes on from what is left."""
        for request_id in dict.fromkeys(request_ids):
            logger.error("journal gap of %s cannot be filled: handed back", request_id)
            epoch = next(part.epoch for part in frame.parts if part.request_id == request_id)
            self._engine.forget(request_id, epoch)
            self._report_store.release(self._incarnation, request_id, epoch)

    def _ends_lost_with(self, frame: Frame, resend: tuple[Place, ...]) -> tuple[Place, ...]:
        """Ends of other choices of these requests: a store that lost the last parts of one may have lost them too, and
        no later part of an ended choice will ever tell. All that is kept of them goes: what the store still has, it
        takes for a repeat.
        """
        asked = {(request_id, choice) for request_id, choice, _ in resend}
        requests = {request_id for request_id, _, _ in resend}
        bindings = {(part.request_id, part.epoch) for part in frame.parts if part.request_id in requests}
        since: dict[tuple[str, int], int] = {}
        ended: list[tuple[str, int]] = []
        for part in (part for _, kept in self._acknowledged for part in kept.parts):
            key = (part.request_id, part.choice)
            if (part.request_id, part.epoch) in bindings and key not in asked:
                since.setdefault(key, part.first_index)
                if part.finish is not None:
                    ended.append(key)
        return tuple((*key, since[key]) for key in ended)

    def _rebuild(self, frame: Frame, request_id: str, choice: int, from_index: int) -> Part | None:
        """One part with everything of a choice from `from_index` on; None where not all of it is known any more."""
        frames = [*(kept for _, kept in self._acknowledged), frame]
        known = [p for f in frames for p in f.parts if (p.request_id, p.choice) == (request_id, choice)]
        tokens: dict[int, int] = {}
        logprobs: dict[int, TokenLogprob] = {}
        for part in known:
            tokens.update(enumerate(part.token_ids, part.first_index))
            logprobs.update(enumerate(part.logprobs, part.first_index))
        last = known[-1]
        wanted = range(from_index, last.first_index + len(last.token_ids))
        are_scored = any(index in logprobs for index in wanted)
        if any(index not in tokens for index in wanted):
            return None
        return replace(
            last,
            first_index=from_index,
            token_ids=tuple(tokens[i] for i in wanted),
            logprobs=tuple(logprobs.get(i, UNTOLD) for i in wanted) if are_scored else (),
            prompt_logprobs=next((part.prompt_logprobs for part in known if part.prompt_logprobs), ()),
        )

    def _hand_back_unstarted(self) -> None:
        """Offers what could not start here to workers with room; the store decides, and fences what we do meanwhile."""
        if self._clock() - self._offered_back_s < BEAT_S:
            return
        for request_id, epoch in self._engine.unstarted()[:OFFERS_AT_ONCE]:
            self._offered_back_s = self._clock()
            try:
                gone = self._report_store.release(self._incarnation, request_id, epoch, only_if_room_elsewhere=True)
            except Unavailable:
                return
            if gone:
                self._engine.forget(request_id, epoch)

    def _keep(self, frame: Frame) -> None:
        now = self._clock()
        if frame.parts:
            self._acknowledged.append((now, frame))
        while self._acknowledged and now - self._acknowledged[0][0] > KEEP_ACKNOWLEDGED_S:
            self._acknowledged.popleft()

    def _rejoin(self) -> None:
        logger.warning("incarnation %s was fenced: starting empty as a new one", self._incarnation)
        self._engine.reset()
        self._acknowledged.clear()
        self._joined.clear()
        self._seq = 0
        self._incarnation = self._new_incarnation()

    # ---- inbox in --------------------------------------------------------------------------------------------------

    def _inbox_loop(self) -> None:
        reading, after_id = "", "0-0"
        retry_s = RETRY_FIRST_S
        while not self._stopping.is_set():
            if not self._joined.wait(BEAT_S):
                continue
            if reading != self._incarnation:
                reading, after_id = self._incarnation, "0-0"
            try:
                entries = self._inbox_store.inbox(reading, after_id, INBOX_BLOCK_MS)
                self._end_damaged(entries)
            except Unavailable as error:
                logger.warning("store away, inbox unread: %s", error)
                self._stopping.wait(retry_s)
                retry_s = min(RETRY_MOST_S, retry_s * 2)
                continue
            retry_s = RETRY_FIRST_S
            if reading != self._incarnation:
                continue
            for entry in entries:
                self._take(entry)
                after_id = entry.id

    def _end_damaged(self, entries: tuple[InboxEntry, ...]) -> None:
        """Tells the clients of requests that cannot be read here: no worker of this release could."""
        for entry in entries:
            if entry.damaged:
                logger.error("request %s is ended: its record cannot be read", entry.request_id)
                self._inbox_store.end(entry.request_id, State.FAILED, entry.damaged)

    def _take(self, entry: InboxEntry) -> None:
        if entry.kind == "bind" and entry.bound is not None:
            self._engine.add(entry.bound)
        elif entry.kind == "cancel":
            self._engine.cancel(entry.request_id, entry.id)
        elif entry.kind == "drain":
            self._engine.drain()
            self._engine.seen(entry.id)
        else:
            self._engine.seen(entry.id)
