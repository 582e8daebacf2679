"""When each call is sent, and what came back when. Open loop: by the clock. Closed loop: when the last answer ends."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Protocol

from benchmarks.errors import CallFailed
from benchmarks.record import CallRecord
from benchmarks.transports import Transport
from benchmarks.workload import Call, Workload


class Observer(Protocol):
    """Who wants to see the run while it goes on; called from the event loop, so it must be quick."""

    def tokens(self, count: int) -> None: ...

    def finished(self, record: CallRecord) -> None: ...


class Drive:
    """One run over one transport, made inside its event loop.

    `timeout_s` bounds it: calls still running then end as `timeout`, calls not sent as `not_sent`. `start_s` is the
    loop's time from which the records count.
    """

    def __init__(self, transport: Transport, observer: Observer, timeout_s: float) -> None:
        self._transport = transport
        self._observer = observer
        self._loop = asyncio.get_running_loop()
        self.start_s = self._loop.time()
        self._deadline_s = self.start_s + timeout_s

    async def run(self, workload: Workload) -> list[CallRecord]:
        """One record per call, in no order."""
        if workload.users is None:
            return await self._open_loop(workload.calls)
        return await self._closed_loop(workload.calls, workload.users)

    async def _open_loop(self, calls: tuple[Call, ...]) -> list[CallRecord]:
        async with asyncio.TaskGroup() as group:
            tasks = []
            for call in sorted(calls, key=lambda call: call.at_s):
                await asyncio.sleep(min(call.at_s - self._now_s(), self._left_s()))
                tasks.append(group.create_task(self._perform(call, call.at_s)))
        return [task.result() for task in tasks]

    async def _closed_loop(self, calls: tuple[Call, ...], users: int) -> list[CallRecord]:
        waiting = iter(calls)  # shared: each user takes the next call there is
        records: list[CallRecord] = []

        async def user() -> None:
            for call in waiting:
                records.append(await self._perform(call, self._now_s()))

        async with asyncio.TaskGroup() as group:
            for _ in range(min(users, len(calls))):
                group.create_task(user())
        return records

    async def _perform(self, call: Call, scheduled_s: float) -> CallRecord:
        """Never raises for the call's own sake: whatever befell it is in the record."""
        progress = _Progress()
        sent_s = self._now_s() if self._left_s() > 0 else None
        error, detail = "", ""
        try:
            if sent_s is None:
                raise CallFailed("not_sent", "the run's time was over")
            async with asyncio.timeout_at(self._deadline_s):
                await self._read(call, progress)
        except TimeoutError:
            error, detail = "timeout", "the run's time was over"
        except CallFailed as failure:
            error, detail = failure.kind, failure.detail
        record = CallRecord(
            index=call.index,
            scheduled_s=scheduled_s,
            sent_s=sent_s,
            token_s=tuple(progress.token_s),
            deltas=progress.deltas,
            end_s=self._now_s(),
            input_tokens=call.input_tokens,
            expected_tokens=call.output_tokens,
            error=error,
            detail=detail,
        )
        self._observer.finished(record)
        return record

    async def _read(self, call: Call, progress: _Progress) -> None:
        async with aclosing(self._transport.stream(call)) as deltas:
            async for delta in deltas:
                now_s = self._now_s()
                if delta.first_index not in (None, len(progress.token_s)):
                    told = f"token {delta.first_index} arrived where {len(progress.token_s)} was next"
                    raise CallFailed("token_order", told)
                progress.token_s.extend([now_s] * delta.count)
                progress.deltas += delta.count > 0
                self._observer.tokens(delta.count)
        if len(progress.token_s) != call.output_tokens:
            # A run that asked for n tokens and got fewer was cheaper than it looks: it must not count as an answer.
            raise CallFailed("token_count", f"{len(progress.token_s)} tokens came of {call.output_tokens}")

    def _now_s(self) -> float:
        return self._loop.time() - self.start_s

    def _left_s(self) -> float:
        return self._deadline_s - self._loop.time()


class _Progress:
    """What has come back of one call so far."""

    def __init__(self) -> None:
        self.token_s: list[float] = []
        self.deltas = 0
