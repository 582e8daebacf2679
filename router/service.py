"""What every ingress calls: submit a call, get a stream of events. No protocol is known here.

    call → cheap refusals → prompt ids → grammar → limits → placement → `admit` → stream

The order matters: whatever costs nothing to refuse is refused before the prompt is rendered, and nothing reaches the
store that could not run. From `Accepted` on, the request is the store's, and this process only delivers it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from headrace.chat_template import ChatTemplate
from headrace.errors import HeadraceError, Overloaded, Unavailable
from headrace.events import Delta, Finished
from headrace.frame import FinishReason
from headrace.request import Request
from headrace.store.interface import Admit, Admitted, BoardRow, Refused, State, Store
from headrace.store.keys import model_tag
from headrace.tokenizer import Tokenizer
from router.admission.call import Call, TokenPrompt
from router.admission.limits import (
    Capacity,
    ModelLimits,
    capacity_of,
    check_choices,
    check_model,
    check_prompt_length,
    check_token_ids,
    resolve,
)
from router.admission.price import OutputEstimate, price_blocks
from router.admission.refusals import error_for
from router.board_view import SLOWEST_START_S, BoardView
from router.config import RouterConfig
from router.delivery.hub import Delivery
from router.delivery.stream import RequestStream
from router.field_names import loggable
from router.grammars.judge import GrammarJudge
from router.metrics import RouterMetrics
from router.placement.choose import PlacementRequest, choose
from router.prompting import PromptEncoder
from router.request_id import mint_request_id

ADMIT_ATTEMPTS = 4
"""A reply may be lost with its connection; asking again by the same id is safe and cheap."""
ADMIT_RETRY_S = 0.1
ADMIT_WITHIN_S = 2.5
"""No new attempt after this: a store that hangs is told to the client instead."""
STORE_RETRY_S = 1.0
"""What a client is told while the store is away: about the time a restart on its AOF takes."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Readiness:
    """Why (not) ready, in numbers a probe can show."""

    store: bool
    workers: int
    serving: bool


class RouterService:
    """One per router process; lives on one event loop."""

    def __init__(self, config: RouterConfig, store: Store, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.config = config
        self.metrics = RouterMetrics(config.model_name)
        max_context = min(tokenizer.max_context, config.max_context or tokenizer.max_context)
        self.limits = ModelLimits(config.model_name, tokenizer.vocab_size, max_context)
        self.tokenizer = tokenizer
        self.started_unix_s = int(time.time())
        self._store = store
        self._prompts = PromptEncoder(tokenizer, template, config.tokenizer_threads)
        self._grammars = GrammarJudge(config.model_path, config.grammar_limit_s)
        self._board = BoardView(store)
        self._estimate = OutputEstimate()
        self._slot_tag = model_tag(config.cluster_id, config.model_name)
        self._delivery = Delivery(store, f"router-{secrets.token_hex(4)}", tokenizer)
        self._capacity: Capacity | None = None
        """Of the last board that had a live worker."""
        self._draining = False
        self._preparing = 0
        """Calls that are not open streams yet."""

    async def start(self) -> None:
        """Joins the store. Raises Unavailable when it cannot be reached."""
        await self._delivery.start()

    async def warm(self) -> None:
        """Has ready what the first request with a grammar would wait for."""
        await self._grammars.warm()

    async def drain(self) -> None:
        """Refuses new calls and waits, at most `drain_s`, for the open ones to end."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._delivery.idle.wait(), self.config.drain_s)

    async def stop(self) -> None:
        """Leaves the store; streams still open break as moved."""
        self._draining = True
        await self._delivery.stop()
        self._prompts.close()
        self._grammars.close()

    @property
    def alive(self) -> bool:
        """The delivery loops run; false means that only a restart helps."""
        return self._delivery.alive

    async def readiness(self) -> Readiness:
        """Serving means: the store answers and at least one worker is live."""
        workers = await self._board.live_workers()
        store = workers is not None and self._delivery.membership.store_away_since_s is None
        return Readiness(store, workers or 0, store and bool(workers) and not self._draining)

    async def submit(self, call: Call) -> RequestStream:
        """Admits the call. The stream's first event is `Accepted`; whoever gets it must leave it (`async with`).

        Raises HeadraceError; then nothing of the call is in the store, or what may be is being cancelled.
        """
        started_s = time.monotonic()
        try:
            with self.noting_refusals():
                return await self._submit(call, started_s)
        except asyncio.CancelledError:
            self.metrics.disconnected()
            raise

    @contextlib.contextmanager
    def noting_refusals(self) -> Iterator[None]:
        """Counts and logs an error that passes through; ingresses parse inside it. What is told to wait gets a time."""
        try:
            yield
        except HeadraceError as error:
            if isinstance(error, Unavailable) and error.retry_after_s is None:
                error.retry_after_s = STORE_RETRY_S
            self.metrics.refused(error)
            log.info("refused: %s", type(error).__name__, extra={"field": loggable(error.field)})
            raise

    async def cancel(self, request_id: str) -> bool | None:
        """An explicit cancel, by whoever knows the id. False: it had ended otherwise; None: it is unknown."""
        if not request_id.startswith(f"{self._slot_tag}-"):
            return None
        state = await self._store.cancel(request_id)
        return None if state is None else state not in (State.FINISHED, State.FAILED)

    async def exposition(self) -> bytes:
        """Prometheus' text; with the store away only this router's own numbers."""
        try:
            rows, census = await self._board.rows(), await self._store.census()
        except HeadraceError:
            return self.metrics.exposition((), None, self._delivery.open_streams)
        return self.metrics.exposition(rows, census, self._delivery.open_streams)

    async def _submit(self, call: Call, started_s: float) -> RequestStream:
        self._refuse_cheaply(call)
        self._preparing += 1
        try:
            token_ids = await self._prompts.token_ids(call)
            check_prompt_length(len(token_ids), self.limits, call.prompt_field)
            if call.sampling.grammar is not None:
                await self._grammars.check(call.sampling.grammar, call.grammar_field)
            board = await self._board.rows()
        finally:
            self._preparing -= 1
        request = resolve(
            call,
            token_ids,
            self.limits,
            self._capacity_now(board),
            request_id=mint_request_id(self._slot_tag),
            drawn_seed=secrets.randbits(63),
        )
        return await self._admit(call, request, board, started_s)

    def _refuse_cheaply(self, call: Call) -> None:
        self._refuse_when_draining()
        check_model(call.model, self.limits)
        check_choices(call)
        call.sampling.validated()
        if isinstance(call.prompt, TokenPrompt):
            check_token_ids(call.prompt.token_ids, self.limits, call.prompt_field)
        cap = self.config.max_open_streams
        if self._delivery.open_streams + self._preparing >= cap:
            raise Overloaded(f"this router already delivers {cap} requests", retry_after_s=self._time_per_answer_s())

    def _refuse_when_draining(self) -> None:
        if self._draining:
            raise Unavailable("this router is shutting down", retry_after_s=STORE_RETRY_S)

    def _time_per_answer_s(self) -> float:
        """The mean time between two answers ending, at the measured drain rate: when a place is likely to be free."""
        rate = sum(row.load.drain_tokens_per_s for row in self._board.last)
        return max(1.0, self._estimate.mean_tokens / rate) if rate > 0 else STORE_RETRY_S

    def _capacity_now(self, board: tuple[BoardRow, ...]) -> Capacity:
        self._capacity = capacity_of(board, self.limits.name) or self._capacity
        if self._capacity is None:
            raise Unavailable("no worker has reported yet", retry_after_s=SLOWEST_START_S)
        return self._capacity

    async def _admit(
        self, call: Call, request: Request, board: tuple[BoardRow, ...], started_s: float
    ) -> RequestStream:
        timer = self.metrics.timer(started_s, request.best or request.n)
        ignore_eos = request.sampling.ignore_eos

        def observe(events: tuple[Delta | Finished, ...]) -> None:
            timer.observe(events)
            for event in events:
                if isinstance(event, Finished) and event.reason is FinishReason.STOP and not ignore_eos:
                    self._estimate.finished(event.completion_tokens)

        # Once more, after tokenising: behind this line the stream counts as open, and a drain waits for it.
        self._refuse_when_draining()
        asked_as = self._delivery.membership.router
        stream = self._delivery.open(request, observe, timer.unfinished)
        try:
            admitted = await self._ask_to_admit(self._admit_call(call, request, board, asked_as))
        except BaseException:
            # The store may have it without our knowing: the client went, or its reply was lost.
            self._delivery.forget(request.id)
            self._delivery.cancel_soon(request.id, None)
            raise
        if isinstance(admitted, Refused):
            self._delivery.forget(request.id)
            raise error_for(admitted)
        prompt_tokens = len(request.prompt_token_ids)
        self._delivery.accepted(stream, asked_as, prompt_tokens)
        self.metrics.accepted(prompt_tokens)
        log.info(
            "accepted",
            extra={
                "request_id": request.id,
                "client_request_id": call.client_request_id,
                "prompt_tokens": prompt_tokens,
                "max_tokens": request.sampling.max_tokens,
                "state": admitted.state.value,
                "worker": admitted.worker,
            },
        )
        return stream

    def _admit_call(self, call: Call, request: Request, board: tuple[BoardRow, ...], router: str) -> Admit:
        prompt_tokens = len(request.prompt_token_ids)
        block_size = self._capacity_now(board).block_size
        price = price_blocks(prompt_tokens, self._estimate.expected_tokens(request), block_size, request.n)
        most = request.sampling.max_tokens or 0
        asked = PlacementRequest(
            request.model, price, prompt_tokens + request.n * most, span_tokens=prompt_tokens + most
        )
        candidates = choose(board, asked)
        if candidates:
            self._board.expect(candidates[0], price)
        return Admit(
            request=request,
            router=router,
            candidates=candidates,
            price_blocks=price,
            deadline_ms=call.deadline_ms,
            result_ttl_ms=self.config.result_ttl_ms,
            tenant_cap_tokens=self.config.tenant_cap_tokens,
            global_cap_tokens=self.config.global_cap_tokens,
        )

    async def _ask_to_admit(self, call: Admit) -> Admitted | Refused:
        give_up_s = time.monotonic() + ADMIT_WITHIN_S
        for attempt in range(ADMIT_ATTEMPTS):
            # A router that was fenced meanwhile asks as its new incarnation; the request id makes it the same request.
            call = replace(call, router=self._delivery.membership.router)
            try:
                return await self._store.admit(call)
            except Unavailable:
                if attempt == ADMIT_ATTEMPTS - 1 or time.monotonic() >= give_up_s:
                    raise
                await asyncio.sleep(ADMIT_RETRY_S)
        raise AssertionError("unreachable: the last attempt returns or raises")
