"""An observer that tests can wait on, so that scripted servers go on when the client has seen what they sent."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.record import CallRecord


class Watcher:
    """The run's observer: counts tokens and calls, and lets a scripted server await them."""

    def __init__(self) -> None:
        self.seen_tokens = 0
        self.records: list[CallRecord] = []
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    def tokens(self, count: int) -> None:
        self.seen_tokens += count
        self._tell()

    def finished(self, record: CallRecord) -> None:
        self.records.append(record)
        self._tell()

    async def until_tokens(self, count: int) -> None:
        """Returns when the client has counted so many tokens; the test's own time-out bounds it."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.seen_tokens >= count)

    def _tell(self) -> None:
        task = asyncio.get_running_loop().create_task(self._notify())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


@pytest.fixture
async def watcher() -> Watcher:
    return Watcher()
