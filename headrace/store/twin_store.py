"""`TwinStore` and `SyncTwinStore`: the store's two protocols over one shared twin, for tests and the simulator.

Calls run in the caller's thread. Blocking reads wake up as soon as another call, from any thread, changes the
twin; their time-outs are of real time, whatever the injected clock says.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from headrace.codec import decode_logprobs, decode_tokens, logprob_bytes
from headrace.errors import Unavailable
from headrace.frame import Frame
from headrace.logprobs import TokenLogprob
from headrace.store import calls
from headrace.store.interface import (
    Admit,
    Admitted,
    Attached,
    Audit,
    BoardRow,
    Census,
    DeliveryEntry,
    InboxEntry,
    Refused,
    Reported,
    RequestStatus,
    State,
    Swept,
)
from headrace.store.keyspace import format_id
from headrace.store.twin import MemoryFull, Twin
from headrace.store.twin.slot import ROUTER, WORKER

INBOX_COUNT = 64
DELIVERY_COUNT = 128


class _Away:
    """A switch for tests: while `away`, every call raises Unavailable, as the adapter's do when the server is gone."""

    def __init__(self, twin: Twin) -> None:
        self.twin = twin
        self.away = False

    def call(self, function: str, *argument: Any) -> Any:
        if self.away:
            raise Unavailable("the store cannot be reached")
        return self.twin.call(function, list(argument))


class TwinStore(_Away):
    """The asynchronous store, as a router sees it."""

    async def admit(self, call: Admit) -> Admitted | Refused:
        refused = calls.refuse_other_model(self.twin.model, call)
        if refused:
            return refused
        try:
            return calls.admit_reply(self.call("admit", *calls.admit_arguments(call)))
        except MemoryFull:
            return calls.refuse_full(call)

    async def cancel(self, request_id: str, *, owner_epoch: int | None = None) -> State | None:
        return calls.cancel_reply(self.call("cancel", request_id, -1 if owner_epoch is None else owner_epoch))

    async def attach(self, request_id: str, router: str, tenant: str) -> Attached | None:
        return calls.attach_reply(self.call("attach", request_id, router, tenant))

    async def end(self, request_id: str, state: State, detail: str) -> bool:
        return bool(self.call("end", *calls.end_arguments(request_id, state, detail))[0])

    async def drain(self, worker_name: str) -> bool:
        return bool(self.call("drain", worker_name)[0])

    async def sweep(self, router: str) -> Swept:
        return calls.sweep_reply(self.call("sweep", router))

    async def board(self) -> tuple[BoardRow, ...]:
        return calls.board_reply(self.call("board"))

    async def status(self, request_id: str) -> RequestStatus | None:
        return calls.status_reply(request_id, self.call("status", request_id))

    async def journal(self, request_id: str, choice: int, from_index: int) -> tuple[int, ...]:
        with self.twin.changed:
            packed = self.twin.keyspace.get(self.twin.keys.journal(request_id, choice))
        return decode_tokens(packed[from_index * 4 :])

    async def logprobs(
        self, request_id: str, choice: int, from_index: int, count: int, tops: int
    ) -> tuple[TokenLogprob, ...]:
        size = logprob_bytes(tops)
        with self.twin.changed:
            packed = self.twin.keyspace.get(self.twin.keys.logprobs(request_id, choice))
        return decode_logprobs(packed[from_index * size : (from_index + count) * size], tops)

    async def prompt_logprobs(self, request_id: str, prompt_tokens: int) -> tuple[TokenLogprob, ...]:
        with self.twin.changed:
            packed = self.twin.keyspace.get(self.twin.keys.prompt_logprobs(request_id))
        return calls.prompt_logprobs_of(packed, prompt_tokens)

    async def deliveries(self, router: str, after_id: str, block_ms: int) -> tuple[DeliveryEntry, ...]:
        loop, woken = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(woken.set)

        deadline = loop.time() + block_ms / 1000
        self.twin.listeners.append(wake)
        try:
            while True:
                woken.clear()
                found = self._delivered(router, after_id)
                if found or loop.time() >= deadline:
                    return found
                try:
                    async with asyncio.timeout_at(deadline):
                        await woken.wait()
                except TimeoutError:
                    return ()
        finally:
            self.twin.listeners.remove(wake)

    def _delivered(self, router: str, after_id: str) -> tuple[DeliveryEntry, ...]:
        if self.away:
            raise Unavailable("the store cannot be reached")
        with self.twin.changed:
            found = self.twin.keyspace.xafter(self.twin.keys.out(router), after_id, DELIVERY_COUNT)
            copies = [(stream_id, dict(fields)) for stream_id, fields in found]
        return tuple(calls.delivery_entry(format_id(i), f) for i, f in copies)

    async def owned(self, router: str) -> tuple[str, ...]:
        with self.twin.changed:
            return tuple(member for member, _ in self.twin.keyspace.zrange(self.twin.keys.own(router)))

    async def census(self) -> Census:
        return calls.census_reply(self.call("census"))

    async def audit(self) -> Audit:
        with self.twin.changed:
            prefix = self.twin.keys.prefix
            names = [key.removeprefix(prefix) for key in self.twin.keyspace.names()]
        return calls.audit_of([self.call("inspect", names)])

    async def leave(self, router: str) -> None:
        self.call("leave", ROUTER, router)

    async def close(self) -> None:
        """Nothing to close: the twin lives on for the others that share it."""


class SyncTwinStore(_Away):
    """The synchronous store, as a worker's link sees it."""

    def report(self, worker: str, frame: Frame) -> Reported:
        return calls.report_reply(self.call("report", *calls.report_arguments(worker, frame)))

    def inbox(self, worker: str, after_id: str, block_ms: int) -> tuple[InboxEntry, ...]:
        key, deadline = self.twin.keys.inbox(worker), time.monotonic() + block_ms / 1000
        with self.twin.changed:
            found = self.twin.keyspace.xafter(key, after_id, INBOX_COUNT)
            while not found and not self.away and (left := deadline - time.monotonic()) > 0:
                self.twin.changed.wait(left)
                found = self.twin.keyspace.xafter(key, after_id, INBOX_COUNT)
        entries = [calls.inbox_entry(format_id(stream_id), fields) for stream_id, fields in found]
        binds = [entry for entry in entries if entry.kind == "bind"]
        fetched = self.call("fetch", worker, [(entry.request_id, entry.epoch) for entry in binds])
        return calls.with_bound(entries, fetched)

    def release(self, worker: str, request_id: str, epoch: int, *, only_if_room_elsewhere: bool = False) -> bool:
        return bool(self.call("release", worker, request_id, epoch, int(only_if_room_elsewhere))[0])

    def end(self, request_id: str, state: State, detail: str) -> bool:
        return bool(self.call("end", *calls.end_arguments(request_id, state, detail))[0])

    def leave(self, worker: str) -> None:
        self.call("leave", WORKER, worker)

    def close(self) -> None:
        """Nothing to close: the twin lives on for the others that share it."""
