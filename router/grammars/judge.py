"""Verdicts on grammars: kept, shared by those who ask for the same at once, found out in child processes."""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from headrace.errors import HeadraceError, InvalidRequest, Overloaded, Unavailable
from headrace.grammar import GrammarFault, check_bounds, digest_of
from headrace.sampling import Grammar
from router.grammars.compiling import CHILD, ChildLost, CompilingChild

CHILDREN = 2
"""So that one exploding grammar does not hold up the next."""
MAX_UNJUDGED = 32
"""Grammars that wait for a child or are with one; more are told to come back."""
MAX_KEPT = 4096
EXPLODED_KEPT_S = 60.0
"""A grammar that took too long may have met a busy machine: it gets another chance after this."""


@dataclass(frozen=True)
class _Verdict:
    reason: str
    """Why not; "" for a good one."""
    until_s: float
    """Time of `time.monotonic` from which on it no longer counts."""


class GrammarJudge:
    """Lives on one event loop, which it never blocks; the waiting is done in `CHILDREN` threads."""

    def __init__(self, model_path: str, limit_s: float, command: tuple[str, ...] = CHILD) -> None:
        """`limit_s`: seconds one compile may take. Nothing is started before the first question, or `warm`."""
        self._limit_s = limit_s
        self._children = [CompilingChild(model_path, limit_s, command) for _ in range(CHILDREN)]
        # Last in, first out: one that runs already is asked before one that would have to be started.
        self._idle: queue.LifoQueue[CompilingChild] = queue.LifoQueue()
        for child in self._children:
            self._idle.put(child)
        self._threads = ThreadPoolExecutor(max_workers=CHILDREN, thread_name_prefix="grammars")
        self._kept: OrderedDict[bytes, _Verdict] = OrderedDict()
        self._asked: dict[bytes, asyncio.Task[str]] = {}

    async def check(self, grammar: Grammar, field: str) -> None:
        """Returns once it is known that workers can carry the grammar out. Raises InvalidRequest naming `field` with
        the reason where they cannot, Overloaded with too many ahead, Unavailable where nothing can compile here.
        """
        check_bounds(grammar, field)
        key = digest_of(grammar)
        reason = self._known(key)
        if reason is None:
            # Shielded: a client that goes takes nothing from another who asks for the same.
            reason = await asyncio.shield(self._asked.get(key) or self._ask(key, grammar))
        if reason:
            raise InvalidRequest(f"{field}: {reason}", field=field)

    async def warm(self) -> None:
        """Starts one child; where it does not come up, the log says so and the first question will try again."""
        with contextlib.suppress(Unavailable):
            await asyncio.get_running_loop().run_in_executor(self._threads, self._with_a_child, None)

    def close(self) -> None:
        """Kills the children; who still waits for a verdict gets none."""
        for child in self._children:
            child.kill()
        # At once: a thread that reads from a child that is gone is told so.
        self._threads.shutdown(cancel_futures=True)
        for child in self._children:
            child.end()

    def _known(self, key: bytes) -> str | None:
        verdict = self._kept.get(key)
        if verdict is None or verdict.until_s <= time.monotonic():
            return None
        self._kept.move_to_end(key)
        return verdict.reason

    def _ask(self, key: bytes, grammar: Grammar) -> asyncio.Task[str]:
        if len(self._asked) >= MAX_UNJUDGED:
            raise Overloaded("too many grammars wait to be compiled", retry_after_s=max(1.0, self._limit_s))
        task = asyncio.create_task(self._judge(key, grammar))
        self._asked[key] = task
        task.add_done_callback(lambda done: self._answered(key, done))
        return task

    async def _judge(self, key: bytes, grammar: Grammar) -> str:
        verdict = await asyncio.get_running_loop().run_in_executor(self._threads, self._with_a_child, grammar)
        self._kept[key] = verdict
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return verdict.reason

    def _answered(self, key: bytes, done: asyncio.Task[str]) -> None:
        del self._asked[key]
        with contextlib.suppress(asyncio.CancelledError, HeadraceError):
            done.result()  # all who asked may have gone: nobody else looks at a failure

    def _with_a_child(self, grammar: Grammar | None) -> _Verdict:
        """In a thread; there are as many children as threads, so one is idle. None: only starts it."""
        child = self._idle.get()
        try:
            child.start()
            return _Verdict("" if grammar is None else child.reason_against(grammar), math.inf)
        except GrammarFault as fault:
            return _Verdict(str(fault), time.monotonic() + EXPLODED_KEPT_S)
        except ChildLost as fault:
            raise Unavailable(str(fault)) from None
        finally:
            self._idle.put(child)
