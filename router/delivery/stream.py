"""One request's events on their way to its client.

The buffer between delivery and a slow reader is bounded by the request's own `max_tokens`: neighbouring deltas of a
choice merge while they wait, so a reader that comes back gets one large delta per choice instead of a backlog.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from headrace.errors import HeadraceError
from headrace.events import Accepted, Delta, Event, Finished, PromptLogprobs
from headrace.frame import FinishReason
from headrace.logprobs import TokenLogprob
from router.delivery.best_of import BestOf
from router.delivery.merging import merged
from router.delivery.progress import ChoiceProgress

FIRST_OWNER_EPOCH = 1
"""What `admit` writes; every `attach` raises it."""


class RequestStream:
    """Async iterator of events: `Accepted`, then `PromptLogprobs` where asked for, then per choice `Delta`s and one
    `Finished`; a break raises HeadraceError.

    Use it as an async context manager: leaving before the end means that the client went, which cancels the request.
    One reader at a time.
    """

    def __init__(
        self,
        request_id: str,
        tenant: str,
        choices: tuple[ChoiceProgress, ...],
        *,
        on_leave: Callable[[RequestStream], None],
        observe: Callable[[tuple[Delta | Finished, ...]], None],
        on_unfinished: Callable[[HeadraceError | None], None],
        clock: Callable[[], float],
        scored_prompt: tuple[int, ...] = (),
        best_of: BestOf | None = None,
    ) -> None:
        """`scored_prompt`: the prompt's ids where its log probabilities are asked for. `best_of` holds all choices
        back; without it they are shown as they come.
        """
        self.request_id = request_id
        self.tenant = tenant
        self.choices = choices
        self.owner_epoch = FIRST_OWNER_EPOCH
        """Whose disconnect this would be: a later owner's request is not ours to cancel."""
        self.admitted = False
        """The store has answered; before that nothing is known to be missing."""
        self.behind = False
        """A hole was seen since the last look into the journal."""
        self.scored_prompt = scored_prompt
        """Empty once its log probabilities are told. Until then no output is: they stand in the store alone, with the
        first token of choice 0, and come before every delta."""
        self.last_news_s = clock()
        self.last_looked_s = 0.0
        self._on_leave = on_leave
        self._observe = observe
        self._on_unfinished = on_unfinished
        self._clock = clock
        self._best_of = best_of
        self._events: list[Event] = []
        self._error: HeadraceError | None = None
        self._ready = asyncio.Event()
        self._left = False

    @property
    def finished(self) -> bool:
        """Every choice has ended; events may still wait to be read."""
        return all(choice.finished for choice in self.choices)

    @property
    def complete(self) -> bool:
        """Finished, or the stream broke: no more events will come."""
        return self._error is not None or self.finished

    @property
    def error(self) -> HeadraceError | None:
        return self._error

    def accept(self, prompt_tokens: int) -> None:
        """The first event: the store has the request. Comes before any delta even if a frame overtook the reply."""
        self.admitted = True
        self._events.insert(0, Accepted(self.request_id, prompt_tokens))
        self._wake()

    def tell_prompt(self, logprobs: tuple[TokenLogprob, ...]) -> None:
        """Once, before any delta; () where no worker told them: then output goes on without."""
        if self.scored_prompt and logprobs:
            self._events.append(PromptLogprobs(self.scored_prompt, logprobs))
            self._wake()
        self.scored_prompt = ()

    def feed(
        self,
        choice: int,
        first_index: int,
        token_ids: tuple[int, ...],
        finish: FinishReason | None,
        detail: str,
        logprobs: tuple[TokenLogprob, ...] = (),
    ) -> bool:
        """Takes one part. False when something before it is missing: the journal has to be read."""
        self.last_news_s = self._clock()
        if self._error is not None or not 0 <= choice < len(self.choices):
            return True
        if self.scored_prompt and choice != 0:
            return True  # read from the journal once choice 0 has brought the prompt's
        events = (
            None if self.scored_prompt else self.choices[choice].take(first_index, token_ids, finish, detail, logprobs)
        )
        if events is None:
            self.behind = True
            return False
        self._show(events if self._best_of is None else self._best_of.take(events))
        return True

    def _show(self, events: tuple[Delta | Finished, ...]) -> None:
        if events:
            self._observe(events)
            for event in events:
                self._append(event)

    def break_with(self, error: HeadraceError) -> None:
        """Ends the stream with an error after what already waits. The first error stands."""
        if not self.complete:
            self._error = error
            self._wake()

    def leave(self) -> None:
        """The reader is gone; tells delivery once."""
        if not self._left:
            self._left = True
            if not self.finished:
                self._on_unfinished(self._error)
            self._on_leave(self)

    def _append(self, event: Event) -> None:
        if isinstance(event, Delta):
            for i in range(len(self._events) - 1, -1, -1):
                waiting = self._events[i]
                if isinstance(waiting, Delta) and waiting.choice == event.choice:
                    joined = merged(waiting, event)
                    if joined is None:
                        break
                    self._events[i] = joined
                    return
        self._events.append(event)
        self._wake()

    def _wake(self) -> None:
        self._ready.set()

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> Event:
        while not self._events:
            if self._error is not None:
                raise self._error
            if self.complete:
                raise StopAsyncIteration
            self._ready.clear()
            await self._ready.wait()
        return self._events.pop(0)

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()
