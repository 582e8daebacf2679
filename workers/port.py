"""What other threads ask of the engine, and what it tells them: posted, never waited for."""

from __future__ import annotations

from collections.abc import Callable

from headrace.frame import Frame
from headrace.request import BoundRequest
from workers.mailbox import Add, Cancel, Drain, Forget, Mailbox, Seen


class EnginePort:
    """The engine's own half of its mailbox is in `workers.engine`. All methods may be called from any thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._mailbox = Mailbox(clock)

    def add(self, bound: BoundRequest) -> None:
        """Takes a request on at the next iteration boundary. Whatever is wrong with it comes back as a part that says
        `failed`.
        """
        self._mailbox.post(Add(bound, self._clock()))

    def cancel(self, request_id: str, inbox_id: str) -> None:
        """The request is in no plan made after the engine has read this; an unknown or ended one is left alone."""
        self._mailbox.post(Cancel(request_id, inbox_id))

    def seen(self, inbox_id: str) -> None:
        """An inbox entry that asks nothing of the engine; later frames count it as read."""
        self._mailbox.post(Seen(inbox_id))

    def forget(self, request_id: str, epoch: int | None = None) -> None:
        """Drops a request that is no longer this worker's, without a word; with `epoch`, only that binding of it."""
        self._mailbox.post(Forget(request_id, epoch))

    def reset(self) -> None:
        """Drops every request and every unsent frame: the incarnation was fenced."""
        self._mailbox.reset()

    def drain(self) -> None:
        """From the next frame on the load report gives no credit; what is held runs on."""
        self._mailbox.post(Drain())

    def next_frame(self, timeout_s: float) -> Frame | None:
        """The oldest frame nobody has taken; None when none comes in time."""
        return self._mailbox.next_frame(timeout_s)
