"""Compiled grammars of this worker, kept by their text; new ones are compiled beside the engine's loop.

Routers have compiled each grammar before it came here, in a process that they could kill (`router.grammars`), so a
compile that never ends is not expected; should it happen, it holds up the thread and those behind it, whose requests
fail when their wait is over, while everything else runs on.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from headrace.grammar import GrammarCompiler, GrammarFault, digest_of

if TYPE_CHECKING:
    import llguidance

    from headrace.sampling import Grammar

CAPACITY = 256
"""Compiled grammars that are kept; the longest unused goes first."""

logger = logging.getLogger(__name__)

_Start: TypeAlias = "llguidance.LLMatcher | GrammarFault"


class GrammarShelf:
    """All methods are thread-safe. The thread is a daemon: nothing it does must be finished."""

    def __init__(self, compiler: GrammarCompiler, capacity: int = CAPACITY) -> None:
        self._compiler = compiler
        self._capacity = capacity
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, _Start] = OrderedDict()
        self._orders: queue.SimpleQueue[tuple[Grammar, Callable[[], None]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread, which first makes the library's tables for the tokenizer; else the first order does."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._compile_all, name="grammars", daemon=True)
                self._thread.start()

    def find(self, grammar: Grammar) -> _Start | None:
        """The matcher at its start, or why there is none; None: it is not kept and must be ordered."""
        key = digest_of(grammar)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def order(self, grammar: Grammar, done: Callable[[], None]) -> None:
        """Has it compiled; `done` is called once, in the shelf's thread, when it can be found."""
        self._orders.put((grammar, done))
        self.start()

    def _compile_all(self) -> None:
        try:
            self._compiler.prepare()
        except Exception:
            logger.exception("grammars cannot be compiled here")
        while True:
            grammar, done = self._orders.get()
            if self.find(grammar) is None:
                self._keep(grammar, self._compile(grammar))
            done()

    def _compile(self, grammar: Grammar) -> _Start:
        try:
            return self._compiler.compile(grammar)
        except GrammarFault as fault:
            return fault
        except Exception as error:  # the library is missing or memory is short; the thread goes on
            logger.exception("a grammar cannot be compiled")
            return GrammarFault(f"its grammar cannot be compiled: {type(error).__name__}: {error}")

    def _keep(self, grammar: Grammar, start: _Start) -> None:
        with self._lock:
            self._kept[digest_of(grammar)] = start
            while len(self._kept) > self._capacity:
                self._kept.popitem(last=False)
