"""The two queues between the engine's thread and the rest of the process: commands in, frames out."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.frame import Frame
from headrace.request import BoundRequest

if TYPE_CHECKING:
    from workers.sampling.grammar_thread import Start

FRAMES_SPAN_S = 10.0
"""The engine pauses when frames of this many seconds wait to be taken (DESIGN section 4)."""
MAX_FRAMES = 16_384


@dataclass(frozen=True)
class Add:
    bound: BoundRequest
    came_s: float
    """Clock time from which it waits."""


@dataclass(frozen=True)
class Cancel:
    request_id: str
    inbox_id: str


@dataclass(frozen=True)
class Seen:
    inbox_id: str


@dataclass(frozen=True)
class Forget:
    request_id: str
    epoch: int | None
    """Only this binding of it; None: whatever is held under the id."""


@dataclass(frozen=True)
class Reset:
    pass


@dataclass(frozen=True)
class Drain:
    pass


@dataclass(frozen=True)
class Compiled:
    """The grammar that this request waited for, or why there is none."""

    bound: BoundRequest
    start: Start


Command = Add | Cancel | Seen | Forget | Reset | Drain | Compiled


class Mailbox:
    """All methods are thread-safe. Commands are unbounded (the store's credit bounds them); frames are bounded by
    `is_full`, which the engine respects before each iteration, so one iteration's frame always finds room.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._commands: deque[Command] = deque()
        self._frames: deque[tuple[float, Frame]] = deque()
        self._stopping = False
        self._resets = 0

    def post(self, command: Command) -> None:
        with self._changed:
            self._commands.append(command)
            self._changed.notify_all()

    def reset(self) -> None:
        """Throws away every unsent frame and every unread command, and the frame of the iteration that is running
        now.
        """
        with self._changed:
            self._frames.clear()
            self._commands.clear()
            self._commands.append(Reset())
            self._resets += 1
            self._changed.notify_all()

    def take(self) -> tuple[tuple[Command, ...], int]:
        """All commands in order, and the count of resets to give back with this iteration's frame."""
        with self._changed:
            taken = tuple(self._commands)
            self._commands.clear()
            return taken, self._resets

    def publish(self, frame: Frame, resets: int) -> None:
        """Queues a frame, unless a reset came since its iteration began."""
        with self._changed:
            if resets == self._resets:
                self._frames.append((self._clock(), frame))
                self._changed.notify_all()

    def next_frame(self, timeout_s: float) -> Frame | None:
        """The oldest frame; None when none comes in time."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._frames), timeout_s)
            if not self._frames:
                return None
            _, frame = self._frames.popleft()
            self._changed.notify_all()
            return frame

    @property
    def is_full(self) -> bool:
        with self._changed:
            return self._is_full()

    def _is_full(self) -> bool:
        if not self._frames:
            return False
        return self._frames[-1][0] - self._frames[0][0] >= FRAMES_SPAN_S or len(self._frames) >= MAX_FRAMES

    def wait_for_room(self) -> bool:
        """Blocks while frames are not taken; False once stopping."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or not self._is_full())
            return not self._stopping

    def wait_for_command(self, timeout_s: float | None = None) -> bool:
        """Blocks until there is something to read, at most `timeout_s` seconds where that is given; False once
        stopping."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or bool(self._commands), timeout_s)
            return not self._stopping

    @property
    def is_stopping(self) -> bool:
        return self._stopping

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
