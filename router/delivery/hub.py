"""Delivery of every open request of this router: tail, catch up, reconcile, cancel (DESIGN section 4, point 6).

All state lives on one event loop. The store's delivery stream is only a fast path: whatever it loses is read from the
journal by token index, so this class may miss any entry and stay right.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterator

from headrace.errors import HeadraceError, Moved
from headrace.events import Delta, Finished
from headrace.frame import FinishReason
from headrace.ranking import measured_logprobs
from headrace.request import Request
from headrace.store.interface import DeliveryEntry, DeliveryPart, Store, Swept
from headrace.text_stream import TextStream
from headrace.tokenizer import Tokenizer
from router.delivery.best_of import BestOf
from router.delivery.catch_up import catch_up
from router.delivery.membership import Membership
from router.delivery.progress import ChoiceProgress
from router.delivery.stream import RequestStream

TAIL_BLOCK_MS = 1_000
RECONCILE_INTERVAL_S = 1.0
RECONCILE_BATCH = 64
"""Silent requests looked up per pass: bounded work, and a thousand silent ones are seen within 16 s."""
MAX_JOURNAL_READS = 16
"""Streams that read their journal at once; the rest wait their turn, so that a rejoin does not flood the store."""
RETRY_DELAY_S = 0.2
CANCEL_ATTEMPTS = 20

Observer = Callable[[tuple[Delta | Finished, ...]], None]

log = logging.getLogger(__name__)


class Delivery:
    """Owns the router's delivery stream. `start` joins the store; `stop` leaves it."""

    def __init__(
        self,
        store: Store,
        name: str,
        tokenizer: Tokenizer,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.membership = Membership(store, name, self._on_sweep, self._on_rejoin)
        self._store = store
        self._tokenizer = tokenizer
        self._clock = clock
        self._streams: dict[str, RequestStream] = {}
        self.idle = asyncio.Event()
        """Set while no stream is open."""
        self.idle.set()
        self._catching_up: set[str] = set()
        self._orphans: set[str] = set()
        """Streams whose request still belongs to a fenced incarnation of this router."""
        self._journal_reads = asyncio.Semaphore(MAX_JOURNAL_READS)
        self._suspects: frozenset[str] = frozenset()
        """Requests the store says are ours and no stream wants; cancelled when two passes in a row agree."""
        self._loops: list[asyncio.Task[None]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def open_streams(self) -> int:
        return len(self._streams)

    @property
    def alive(self) -> bool:
        """No loop has ended by a fault of ours."""
        return bool(self._loops) and not any(task.done() for task in self._loops)

    async def start(self) -> None:
        """Raises Unavailable when the store cannot be reached."""
        await self.membership.join()
        for loop in (self._tail(), self.membership.run(), self._reconcile()):
            self._loops.append(asyncio.create_task(loop))

    async def stop(self) -> None:
        """Ends the loops, lets running cancels reach the store, gives up the lease. Open streams break as moved."""
        for stream in list(self._streams.values()):
            stream.break_with(Moved("this router is shutting down; attach to another"))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)
        for task in (*self._loops, *self._tasks):
            task.cancel()
        await asyncio.gather(*self._loops, *self._tasks, return_exceptions=True)
        await self.membership.leave()

    def open(
        self, request: Request, observe: Observer, on_unfinished: Callable[[HeadraceError | None], None]
    ) -> RequestStream:
        """A stream for a request about to be admitted: frames may come before `admit` has replied.

        `observe` sees the events before the client does; `on_unfinished` hears of a stream left before its end, with
        the error that broke it, if any.
        """
        prompt_tokens = len(request.prompt_token_ids)
        tops = measured_logprobs(request)
        choices = tuple(
            ChoiceProgress(i, prompt_tokens, TextStream(self._tokenizer, request.sampling), tops)
            for i in range(request.n)
        )
        shows_logprobs = request.sampling.logprobs is not None
        stream = RequestStream(
            request.id,
            request.tenant,
            choices,
            on_leave=self._on_leave,
            observe=observe,
            on_unfinished=on_unfinished,
            clock=self._clock,
            scored_prompt=() if request.sampling.prompt_logprobs is None else request.prompt_token_ids,
            best_of=BestOf(request.n, request.best, shows_logprobs=shows_logprobs) if request.best else None,
        )
        self._streams[request.id] = stream
        self.idle.clear()
        return stream

    def accepted(self, stream: RequestStream, router: str, prompt_tokens: int) -> None:
        """The store has the request, owned by `router`, which may have been fenced while it was asked."""
        stream.accept(prompt_tokens)
        if router != self.membership.router:
            self._orphans.add(stream.request_id)
            self._catch_up_soon(stream)

    def cancel_soon(self, request_id: str, owner_epoch: int | None) -> None:
        """Cancels without waiting; what an absent store does not hear, reconciliation repeats."""
        self._spawn(self._cancel(request_id, owner_epoch))

    def forget(self, request_id: str) -> None:
        """Drops a stream whose request was refused: the store has nothing of it."""
        self._streams.pop(request_id, None)
        self._orphans.discard(request_id)
        if not self._streams:
            self.idle.set()

    def _on_leave(self, stream: RequestStream) -> None:
        self.forget(stream.request_id)
        if not stream.finished and not isinstance(stream.error, Moved):
            self.cancel_soon(stream.request_id, stream.owner_epoch)

    async def _cancel(self, request_id: str, owner_epoch: int | None) -> None:
        for _ in range(CANCEL_ATTEMPTS):
            try:
                await self._store.cancel(request_id, owner_epoch=owner_epoch)
                return
            except HeadraceError:
                await asyncio.sleep(RETRY_DELAY_S)

    # -- the fast path --

    async def _tail(self) -> None:
        router, after_id = self.membership.router, "0"
        while True:
            if router != self.membership.router:
                router, after_id = self.membership.router, "0"
            try:
                entries = await self._store.deliveries(router, after_id, TAIL_BLOCK_MS)
            except HeadraceError:
                await asyncio.sleep(RETRY_DELAY_S)
                continue
            for entry in entries:
                self._deliver(entry)
                after_id = entry.id

    def _deliver(self, entry: DeliveryEntry) -> None:
        for part in entry.parts:
            stream = self._streams.get(part.request_id)
            if stream is not None:
                with self._failing_alone(stream):
                    self._feed(stream, part)

    def _feed(self, stream: RequestStream, part: DeliveryPart) -> None:
        finish = FinishReason(part.finish) if part.finish else None
        if not stream.feed(part.choice, part.first_index, part.token_ids, finish, part.detail, part.logprobs):
            self._catch_up_soon(stream)

    @contextlib.contextmanager
    def _failing_alone(self, stream: RequestStream) -> Iterator[None]:
        """A fault of ours with one request's parts ends that request, never the loop that serves all of them."""
        try:
            yield
        except HeadraceError:
            raise
        except Exception:
            log.exception("a part cannot be delivered", extra={"request_id": stream.request_id})
            stream.break_with(HeadraceError("the router could not deliver this request"))

    # -- the journal --

    def _catch_up_soon(self, stream: RequestStream) -> None:
        if stream.request_id not in self._catching_up:
            self._catching_up.add(stream.request_id)
            self._spawn(self._catch_up(stream))

    async def _catch_up(self, stream: RequestStream) -> None:
        try:
            async with self._journal_reads:
                await self._take_over(stream)
                with self._failing_alone(stream):
                    await catch_up(self._store, self.membership.router, stream)
        except HeadraceError as error:
            # Reconciliation comes back to it once the store answers.
            log.info("could not read a journal: %s", error.message, extra={"request_id": stream.request_id})
        finally:
            self._catching_up.discard(stream.request_id)

    def _on_sweep(self, swept: Swept) -> None:
        for request_id in swept.ended:
            stream = self._streams.get(request_id)
            if stream is not None and stream.admitted:
                self._catch_up_soon(stream)

    def _on_rejoin(self) -> None:
        """Every open stream belongs to the old incarnation now; each is taken over before its journal is read."""
        for stream in self._streams.values():
            if stream.admitted:
                self._orphans.add(stream.request_id)
                self._catch_up_soon(stream)

    async def _take_over(self, stream: RequestStream) -> None:
        if stream.request_id not in self._orphans:
            return
        attached = await self._store.attach(stream.request_id, self.membership.router, stream.tenant)
        self._orphans.discard(stream.request_id)
        if attached is not None:
            stream.owner_epoch = attached.owner_epoch

    # -- once a second --

    async def _reconcile(self) -> None:
        while True:
            await asyncio.sleep(RECONCILE_INTERVAL_S)
            try:
                owned = frozenset(await self._store.owned(self.membership.router))
            except HeadraceError:
                continue
            self._cancel_strays(owned)
            self._look_up_silent(owned)

    def _cancel_strays(self, owned: frozenset[str]) -> None:
        strays = owned - self._streams.keys()
        for request_id in strays & self._suspects:
            log.info("cancelling a request that nobody reads", extra={"request_id": request_id})
            self.cancel_soon(request_id, None)
        self._suspects = strays

    def _look_up_silent(self, owned: frozenset[str]) -> None:
        now = self._clock()
        silent = [
            stream
            for stream in self._streams.values()
            if stream.admitted
            and not stream.complete
            and (now - stream.last_news_s >= RECONCILE_INTERVAL_S or stream.request_id not in owned)
        ]
        silent.sort(key=lambda stream: stream.last_looked_s)
        for stream in silent[:RECONCILE_BATCH]:
            stream.last_looked_s = now
            self._catch_up_soon(stream)

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
