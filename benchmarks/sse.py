"""Server-sent events out of the pieces a socket gives (WHATWG HTML, section 9.2.6), no more than a benchmark needs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    """`id` is empty when the event carries none."""

    data: str
    id: str = ""


class EventReader:
    """Feed it bytes in any pieces; it gives each event once, when its blank line has come."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []
        self._id = ""

    def feed(self, piece: bytes) -> list[Event]:
        """The events that `piece` completed, in order. Comments and fields other than `data` and `id` are skipped."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return [event for line in lines if (event := self._line(line.removesuffix(b"\r"))) is not None]

    def _line(self, line: bytes) -> Event | None:
        if not line:
            data, event_id = self._data, self._id
            self._data, self._id = [], ""
            return Event("\n".join(data), event_id) if data else None
        name, _, value = line.decode("utf-8", errors="replace").partition(":")
        if name == "data":
            self._data.append(value.removeprefix(" "))
        elif name == "id":
            self._id = value.removeprefix(" ")
        return None
