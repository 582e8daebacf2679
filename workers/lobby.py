"""Requests whose grammar is not compiled yet: bound to this worker, not in the roster.

They hold no blocks, stand in nobody's way and are not handed back: compiling elsewhere takes as long.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from headrace.frame import LoadReport
from headrace.grammar import GrammarCompiler
from headrace.request import BoundRequest
from headrace.tokenizer import Tokenizer
from workers.mailbox import Compiled
from workers.sampling.grammar_thread import GrammarThread

MAX_WAIT_S = 30.0
"""A request whose grammar is not ready by then fails. Where it was admitted, compiling took at most seconds."""
OVERDUE = f"its grammar was not compiled within {MAX_WAIT_S:.0f} s"
WAITS_FOR = "grammar"


@dataclass(frozen=True)
class _Guest:
    bound: BoundRequest
    came_s: float
    until_s: float


class Lobby:
    """Owned by the engine's thread. At most one binding of a request is in it."""

    def __init__(
        self, tokenizer: Tokenizer | None, post: Callable[[Compiled], None], clock: Callable[[], float]
    ) -> None:
        """`post` is called in a thread of its own. Without a tokenizer there are no grammars here."""
        self._thread = GrammarThread(GrammarCompiler(tokenizer)) if tokenizer is not None else None
        self._post = post
        self._clock = clock
        self._waited_s = 0.0
        """Of all who have left, once for each choice."""
        self._guests: dict[str, _Guest] = {}

    def open(self) -> None:
        """Before anybody comes: has what the first grammar would wait for made in the background."""
        if self._thread is not None:
            self._thread.start()

    def keeps(self, bound: BoundRequest, came_s: float) -> bool:
        """False where the request has no grammar, or cannot have one here, and may begin now. Otherwise it is in the
        lobby from here on, and `post` tells when it may; a binding that is in it already, or is older than one that
        is, changes nothing.
        """
        guest = self._guests.get(bound.request.id)
        if guest is not None and guest.bound.epoch >= bound.epoch:
            return True
        grammar = bound.request.sampling.grammar
        if grammar is None or self._thread is None:
            return False
        self._guests[bound.request.id] = _Guest(bound, came_s, self._clock() + MAX_WAIT_S)
        self._thread.order(grammar, lambda start: self._post(Compiled(bound, start)))
        return True

    def leave(self, request_id: str, epoch: int | None = None) -> BoundRequest | None:
        """Takes a request out; with `epoch` only that binding of it. None where it is not there."""
        guest = self._guests.get(request_id)
        if guest is None or epoch not in (None, guest.bound.epoch):
            return None
        del self._guests[request_id]
        self._waited_s += (self._clock() - guest.came_s) * guest.bound.request.n
        return guest.bound

    def overdue(self) -> tuple[BoundRequest, ...]:
        """Takes out whoever has waited too long."""
        if not self._guests:
            return ()
        now = self._clock()
        late = [guest.bound for guest in self._guests.values() if guest.until_s <= now]
        for bound in late:
            self.leave(bound.request.id)
        return tuple(late)

    def patience_s(self) -> float | None:
        """Seconds until somebody is overdue; None with nobody there."""
        if not self._guests:
            return None
        return max(0.0, min(guest.until_s for guest in self._guests.values()) - self._clock())

    def clear(self) -> None:
        self._guests.clear()

    def counted_in(self, load: LoadReport) -> LoadReport:
        """`load` with those who wait here, each choice of which will need a place, and the time of those who did."""
        if self._waited_s:
            waited = (*load.waited_s_by_reason, (WAITS_FOR, self._waited_s))
            load = replace(load, waited_s_by_reason=waited)
        if not self._guests:
            return load
        choices = sum(guest.bound.request.n for guest in self._guests.values())
        return replace(
            load,
            waiting=load.waiting + choices,
            free_slots=max(0, load.free_slots - choices),
            waiting_by_reason=(*load.waiting_by_reason, (WAITS_FOR, choices)),
        )
