"""Grammars are compiled beside the engine's loop, once for each request.

Compiled matchers are not kept for the next request that asks for the same: copies of one share its lexer, whose
states grow with everything they have read, so a request could run into the limits that others have used up, or fail
with them. Among the choices of one request that sharing is wanted.

Routers have compiled each grammar before it came here, in a process that they could kill (`router.grammars`), so a
compile that never ends is not expected; should it happen, it holds up the thread and those behind it, whose requests
fail when their wait is over, while everything else runs on.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from headrace.grammar import GrammarCompiler, GrammarFault

if TYPE_CHECKING:
    import llguidance

    from headrace.sampling import Grammar

logger = logging.getLogger(__name__)

Start: TypeAlias = "llguidance.LLMatcher | GrammarFault"
"""A matcher at its start, or why there is none."""


class GrammarThread:
    """Methods may be called from any thread. The thread is a daemon: nothing it does must be finished."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._lock = threading.Lock()
        self._orders: queue.SimpleQueue[tuple[Grammar, Callable[[Start], None]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread, which first makes the library's tables for the tokenizer; else the first order does."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._compile_all, name="grammars", daemon=True)
                self._thread.start()

    def order(self, grammar: Grammar, done: Callable[[Start], None]) -> None:
        """Has it compiled; `done` is called once, in this thread."""
        self._orders.put((grammar, done))
        self.start()

    def _compile_all(self) -> None:
        try:
            self._compiler.prepare()
        except Exception:
            logger.exception("grammars cannot be compiled here")
        while True:
            grammar, done = self._orders.get()
            done(self._compile(grammar))

    def _compile(self, grammar: Grammar) -> Start:
        try:
            return self._compiler.compile(grammar)
        except GrammarFault as fault:
            return fault
        except Exception as error:  # the library is missing or memory is short; the thread goes on
            logger.exception("a grammar cannot be compiled")
            return GrammarFault(f"{type(error).__name__}: {error}")
