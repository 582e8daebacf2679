"""How the supervisor tells the CLI how far the start is: one JSON object a line, over a pipe."""

from __future__ import annotations

import contextlib
import json
import os
import select
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any


@dataclass(frozen=True)
class Event:
    """`kind`: `begin` and `done` of a stage, `warning`, `ready` (detail: the state), `failed` (text: one sentence)."""

    kind: str
    text: str
    seconds: float = 0.0
    detail: dict[str, Any] = field(default_factory=dict)


class Reporter:
    """Writes events to a file descriptor; a reader that has gone away is not an error."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._began = time.monotonic()

    @contextmanager
    def stage(self, text: str) -> Iterator[None]:
        """Tells that `text` began and, unless it raises, how long it took."""
        self.send(Event("begin", text))
        began = time.monotonic()
        yield
        self.send(Event("done", text, time.monotonic() - began))

    def warning(self, text: str) -> None:
        self.send(Event("warning", text))

    def ready(self, detail: dict[str, Any]) -> None:
        self.send(Event("ready", "ready", time.monotonic() - self._began, detail))

    def failed(self, text: str) -> None:
        self.send(Event("failed", text))

    def send(self, event: Event) -> None:
        line = json.dumps(event.__dict__) + "\n"
        print(line, end="", flush=True)  # the log has the same account
        with contextlib.suppress(OSError):
            os.write(self._descriptor, line.encode())

    def reader_is_gone(self) -> bool:
        """Whether the other end of the pipe has been closed."""
        poll = select.poll()
        poll.register(self._descriptor, 0)
        return any(state & (select.POLLERR | select.POLLHUP | select.POLLNVAL) for _, state in poll.poll(0))


def read_events(stream: IO[str]) -> Iterator[Event]:
    """Events until the writer closes its end."""
    for line in stream:
        yield Event(**json.loads(line))
