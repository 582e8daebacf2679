"""Where a choice stands in its grammar: which ids may come next, and what came.

The matcher is the library's (`headrace.grammar`); this keeps its faults to the one choice they belong to. It holds no
state but what its tokens put there, so a choice that continues elsewhere is replayed by accepting the same tokens.
"""

from __future__ import annotations

import ctypes
import logging
from typing import TYPE_CHECKING

from headrace.grammar import GrammarFault, one_line

if TYPE_CHECKING:
    from workers.sampling.grammar_thread import Start

logger = logging.getLogger(__name__)


class GrammarPosition:
    """A `GrammarState` of the model interface. The engine's thread calls it."""

    def __init__(self, start: Start) -> None:
        """`start` is shared by all choices of a request and stays where it is. Raises it where it is a fault."""
        if isinstance(start, GrammarFault):
            raise start
        self._matcher = start.deep_copy()
        self.fault = ""
        """Why no token may come any more, once the library has failed on it."""

    def fill_mask(self, out_row: memoryview) -> None:
        """See `GrammarState`. Never raises: after a fault the row stays 0, and whoever finds that nothing may come
        reads `fault`.
        """
        if self.fault:
            return
        address = ctypes.addressof(ctypes.c_char.from_buffer(out_row))
        try:
            self._matcher.unsafe_compute_mask_ptr(address, out_row.nbytes)
            if not self._matcher.is_error():
                return
            self._fail(self._matcher.get_error())
        except BaseException as fault:
            # A panic in the library is not an Exception; it must not end the step for everybody.
            if isinstance(fault, KeyboardInterrupt | SystemExit):
                raise
            self._fail(f"{type(fault).__name__}: {fault}")
        ctypes.memset(address, 0, out_row.nbytes)

    def accept(self, token_id: int) -> None:
        """Moves past one token. Raises GrammarFault where it is not in the language, or the library fails."""
        if self.fault:
            raise GrammarFault(self.fault)
        try:
            if self._matcher.consume_token(token_id):
                return
            reason = self._matcher.get_error()
        except BaseException as fault:
            if isinstance(fault, KeyboardInterrupt | SystemExit):
                raise
            reason = f"{type(fault).__name__}: {fault}"
        self._fail(reason or f"token {token_id} is not in its language")
        raise GrammarFault(self.fault)

    @property
    def complete(self) -> bool:
        """Nothing can follow: the text is in the language and no longer one that begins with it is, or EOS was
        accepted.
        """
        return not self.fault and bool(self._matcher.is_stopped()) and bool(self._matcher.is_accepting())

    def _fail(self, reason: str) -> None:
        self.fault = f"the grammar cannot go on: {one_line(reason)}"
        logger.warning("a grammar failed", extra={"reason": self.fault})
