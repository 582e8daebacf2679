"""The store in Redis: arguments and replies carried to the functions and back. The only module that imports redis.

Every command has a time limit; a server that is away, slow, loading or read-only raises `Unavailable`, and nothing else
of redis' own errors gets out. Calls are idempotent, so a broken connection is tried once more at once. A server that
lacks the functions (a new one, a restart without them, FUNCTION FLUSH) gets them and the call is made again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import msgpack
import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import OutOfMemoryError, RedisError, ResponseError
from redis.retry import Retry

from headrace.codec import decode_logprobs, decode_tokens, logprob_bytes
from headrace.errors import Unavailable
from headrace.frame import Frame
from headrace.logprobs import TokenLogprob
from headrace.store import calls
from headrace.store.functions import Library, library
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
from headrace.store.keys import Keys
from headrace.store.limits import RETRY_MS
from headrace.store.server_check import ServerCheck, judge, why_away, why_unavailable

CALL_TIMEOUT_S = 2.0
CONNECT_TIMEOUT_S = 2.0
MAX_BLOCK_MS = 2_000
"""A blocking read comes back at least this often, so that a dead connection is noticed."""
MAX_CONNECTIONS = 32
"""Of one router. The server answers one command at a time, so more calls than that wait here rather than there."""
INBOX_COUNT = 64
DELIVERY_COUNT = 128
SCAN_COUNT = 512
TOKEN_BYTES = 4

NOT_FOUND = "function not found"


def _options(retry: Any) -> dict[str, Any]:
    return {
        "socket_timeout": CALL_TIMEOUT_S + MAX_BLOCK_MS / 1000,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "protocol": 2,
        "retry": retry,
    }


@contextmanager
def _translated(tell: Callable[[BaseException], str] = why_away) -> Iterator[None]:
    """Turns what redis raises into Unavailable with one clear sentence, that of `tell`."""
    try:
        yield
    except (RedisError, OSError, ValueError) as fault:
        raise Unavailable(tell(fault), retry_after_s=RETRY_MS / 1000) from fault


def _is_unknown_function(fault: ResponseError) -> bool:
    return NOT_FOUND in str(fault).lower()


def _pack(argument: tuple[Any, ...]) -> bytes:
    packed: bytes = msgpack.packb(argument, use_bin_type=False)
    return packed


def _unpack(reply: bytes) -> Any:
    return msgpack.unpackb(reply, raw=True)


def _block(block_ms: int) -> int | None:
    """Redis reads 0 as "for ever"."""
    return min(block_ms, MAX_BLOCK_MS) if block_ms > 0 else None


def _entries(reply: Any) -> list[tuple[str, dict[str, Any]]]:
    """XREAD's reply for one stream."""
    if not reply:
        return []
    return [
        (entry_id.decode(), {name.decode(): value for name, value in fields.items()})
        for entry_id, fields in reply[0][1]
    ]


class _Commands:
    """What both stores send: the calls of one model's functions, and the load of their library."""

    def __init__(self, client: Any, cluster_id: str, model: str, functions: Library | None = None) -> None:
        self._client = client
        self._model = model
        self._keys = Keys(cluster_id, model)
        self._library = functions or library()
        self._load = ("FUNCTION", "LOAD", "REPLACE", self._library.source)

    def _fcall(self, function: str, argument: tuple[Any, ...]) -> tuple[Any, ...]:
        return ("FCALL", self._library.function(function), 1, self._keys.board, _pack(argument))


class AsyncRedisStore(_Commands):
    """The asynchronous store, as a router sees it. One event loop; safe for any number of tasks on it."""

    @classmethod
    def connect(cls, url: str, cluster_id: str, model: str) -> Self:
        """`url` is redis://, rediss:// or unix://. Opens nothing yet: connections are made, and the functions loaded,
        by the first calls that need them. Raises Unavailable for a URL that is none of these."""
        with _translated():
            # The plain pool refuses the call that finds no connection free; in this one it waits its turn.
            pool = redis.asyncio.BlockingConnectionPool.from_url(
                url, max_connections=MAX_CONNECTIONS, timeout=CALL_TIMEOUT_S, **_options(AsyncRetry(NoBackoff(), 1))
            )
        return cls(redis.asyncio.Redis.from_pool(pool), cluster_id, model)

    async def _call(self, function: str, *argument: Any) -> Any:
        """One limit for all tries, below the connection's own, which has to allow for blocking reads."""
        call = self._fcall(function, argument)
        with _translated():
            async with asyncio.timeout(CALL_TIMEOUT_S):
                try:
                    reply = await self._client.execute_command(*call)
                except ResponseError as fault:
                    if not _is_unknown_function(fault):
                        raise
                    await self._client.execute_command(*self._load)
                    reply = await self._client.execute_command(*call)
        return _unpack(reply)

    async def admit(self, call: Admit) -> Admitted | Refused:
        refused = calls.refuse_other_model(self._model, call)
        if refused:
            return refused
        try:
            return calls.admit_reply(await self._call("admit", *calls.admit_arguments(call)))
        except Unavailable as fault:
            if isinstance(fault.__cause__, OutOfMemoryError):
                return calls.refuse_full(call)
            raise

    async def cancel(self, request_id: str, *, owner_epoch: int | None = None) -> State | None:
        return calls.cancel_reply(await self._call("cancel", request_id, -1 if owner_epoch is None else owner_epoch))

    async def attach(self, request_id: str, router: str, tenant: str) -> Attached | None:
        return calls.attach_reply(await self._call("attach", request_id, router, tenant))

    async def end(self, request_id: str, state: State, detail: str) -> bool:
        return bool((await self._call("end", *calls.end_arguments(request_id, state, detail)))[0])

    async def drain(self, worker_name: str) -> bool:
        return bool((await self._call("drain", worker_name))[0])

    async def sweep(self, router: str) -> Swept:
        return calls.sweep_reply(await self._call("sweep", router))

    async def board(self) -> tuple[BoardRow, ...]:
        return calls.board_reply(await self._call("board"))

    async def status(self, request_id: str) -> RequestStatus | None:
        return calls.status_reply(request_id, await self._call("status", request_id))

    async def journal(self, request_id: str, choice: int, from_index: int) -> tuple[int, ...]:
        with _translated():
            packed = await self._client.getrange(self._keys.journal(request_id, choice), from_index * TOKEN_BYTES, -1)
        return decode_tokens(packed)

    async def logprobs(
        self, request_id: str, choice: int, from_index: int, count: int, tops: int
    ) -> tuple[TokenLogprob, ...]:
        size = logprob_bytes(tops)
        first, last = from_index * size, (from_index + count) * size - 1
        with _translated():
            packed = await self._client.getrange(self._keys.logprobs(request_id, choice), first, last)
        return decode_logprobs(packed, tops)

    async def prompt_logprobs(self, request_id: str, prompt_tokens: int) -> tuple[TokenLogprob, ...]:
        with _translated():
            packed = await self._client.get(self._keys.prompt_logprobs(request_id))
        return calls.prompt_logprobs_of(packed or b"", prompt_tokens)

    async def deliveries(self, router: str, after_id: str, block_ms: int) -> tuple[DeliveryEntry, ...]:
        stream = {self._keys.out(router): after_id or "0-0"}
        with _translated():
            reply = await self._client.xread(stream, count=DELIVERY_COUNT, block=_block(block_ms))
        return tuple(calls.delivery_entry(i, f) for i, f in _entries(reply))

    async def owned(self, router: str) -> tuple[str, ...]:
        with _translated():
            return tuple(member.decode() for member in await self._client.zrange(self._keys.own(router), 0, -1))

    async def census(self) -> Census:
        return calls.census_reply(await self._call("census"))

    async def audit(self) -> Audit:
        seen: set[bytes] = set()
        pages: list[Any] = []
        cursor = 0
        while True:
            with _translated():
                cursor, page = await self._client.scan(cursor, match=self._pattern(), count=SCAN_COUNT)
            fresh = [key for key in page if key not in seen]
            seen.update(fresh)
            if fresh:
                pages.append(await self._call("inspect", [key[len(self._keys.prefix) :] for key in fresh]))
            if cursor == 0:
                return calls.audit_of(pages)

    def _pattern(self) -> str:
        return self._keys.prefix + "*"

    async def leave(self, router: str) -> None:
        await self._call("leave", "r:", router)

    async def close(self) -> None:
        await self._client.aclose()


class SyncRedisStore(_Commands):
    """The synchronous store, as a worker's link sees it. Safe from any number of threads."""

    @classmethod
    def connect(cls, url: str, cluster_id: str, model: str) -> Self:
        """As `AsyncRedisStore.connect`."""
        with _translated():
            client = redis.Redis.from_url(url, **_options(Retry(NoBackoff(), 1)))
        return cls(client, cluster_id, model)

    def _call(self, function: str, *argument: Any) -> Any:
        call = self._fcall(function, argument)
        with _translated():
            try:
                reply = self._client.execute_command(*call)
            except ResponseError as fault:
                if not _is_unknown_function(fault):
                    raise
                self._client.execute_command(*self._load)
                reply = self._client.execute_command(*call)
        return _unpack(reply)

    def report(self, worker: str, frame: Frame) -> Reported:
        return calls.report_reply(self._call("report", *calls.report_arguments(worker, frame)))

    def inbox(self, worker: str, after_id: str, block_ms: int) -> tuple[InboxEntry, ...]:
        stream = {self._keys.inbox(worker): after_id or "0-0"}
        with _translated():
            reply = self._client.xread(stream, count=INBOX_COUNT, block=_block(block_ms))
        entries = [calls.inbox_entry(entry_id, fields) for entry_id, fields in _entries(reply)]
        binds = [(entry.request_id, entry.epoch) for entry in entries if entry.kind == "bind"]
        return calls.with_bound(entries, self._call("fetch", worker, binds) if binds else ())

    def release(self, worker: str, request_id: str, epoch: int, *, only_if_room_elsewhere: bool = False) -> bool:
        return bool(self._call("release", worker, request_id, epoch, int(only_if_room_elsewhere))[0])

    def end(self, request_id: str, state: State, detail: str) -> bool:
        return bool(self._call("end", *calls.end_arguments(request_id, state, detail))[0])

    def leave(self, worker: str) -> None:
        self._call("leave", "w:", worker)

    def close(self) -> None:
        self._client.close()


def check_server(url: str) -> ServerCheck:
    """What server this is and what about its settings endangers accepted requests. Raises Unavailable with one clear
    sentence when it cannot be reached, refuses the password or is too old for functions."""
    with _translated(why_unavailable):
        client = redis.Redis.from_url(url, **_options(Retry(NoBackoff(), 0)))
        try:
            facts: dict[str, Any] = {}
            for section in ("server", "memory", "persistence"):
                facts.update(client.info(section))
        finally:
            client.close()
    return judge(facts)
