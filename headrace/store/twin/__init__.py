"""The pure-Python twin of the Redis functions: the same arguments give the same reply and leave the same keys.

Ownership: a `Twin` owns its keyspace and serialises calls with one lock, as Redis' single thread does. It imports
only the standard library and headrace, so scheduler tests and the simulator run without a server.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from headrace.store.keys import Keys
from headrace.store.keyspace import Keyspace
from headrace.store.twin import admission, lifecycle, reading, reporting
from headrace.store.twin.slot import Slot

FUNCTIONS: dict[str, Callable[..., list[object]]] = {
    "admit": admission.admit,
    "report": reporting.report,
    "release": reporting.release,
    "cancel": lifecycle.cancel,
    "attach": lifecycle.attach,
    "end": lifecycle.end,
    "drain": lifecycle.drain,
    "leave": lifecycle.leave,
    "sweep": lifecycle.sweep,
    "board": reading.board,
    "status": reading.status,
    "fetch": reading.fetch,
    "census": reading.census,
    "inspect": reading.inspect,
}


class MemoryFull(Exception):
    """The twin's stand-in for Redis' refusal of `admit` at maxmemory."""


class Twin:
    """One slot in memory. `clock` gives milliseconds; `memory_full` refuses `admit` as Redis would."""

    def __init__(self, cluster_id: str, model: str, clock: Callable[[], int], run_id: str = "run-1") -> None:
        self.model = model
        self.keys = Keys(cluster_id, model)
        self.keyspace = Keyspace()
        self.clock = clock
        self.run_id = run_id
        self.memory_full = False
        self.changed = threading.Condition()
        """Notified after every call; also the lock that serialises them."""
        self.listeners: list[Callable[[], None]] = []
        """Called, from the calling thread, after every call."""

    def slot(self) -> Slot:
        return Slot(self.keyspace, self.keys, self.clock(), self.run_id)

    def call(self, function: str, argument: list[Any]) -> list[object]:
        """Runs one function as FCALL would. Raises MemoryFull for `admit` while `memory_full`."""
        with self.changed:
            if function == "admit" and self.memory_full:
                raise MemoryFull
            reply = FUNCTIONS[function](self.slot(), *argument)
            self.changed.notify_all()
        for listener in list(self.listeners):
            listener()
        return reply
