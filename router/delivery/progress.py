"""How far one choice has been delivered: every token index exactly once, in order, whatever the parts do.

Parts come from two places, the delivery stream and the journal, late, twice or with holes. Text is made here, as a pure
function of the tokens so far, so that it does not depend on how they were cut into parts.
"""

from __future__ import annotations

from typing import Protocol

from headrace.events import Delta, Finished
from headrace.frame import FinishReason


class TextOfTokens(Protocol):
    """What `headrace.text_stream.TextStream` offers."""

    def push(self, token_ids: tuple[int, ...]) -> str: ...
    def finish(self, reason: FinishReason) -> str: ...


class ChoiceProgress:
    """The delivered prefix of one choice. Not thread-safe: it lives on the event loop."""

    def __init__(self, choice: int, prompt_tokens: int, text: TextOfTokens) -> None:
        self.choice = choice
        self.next_index = 0
        self.finished = False
        self._prompt_tokens = prompt_tokens
        self._text = text

    def take(
        self, first_index: int, token_ids: tuple[int, ...], finish: FinishReason | None = None, detail: str = ""
    ) -> tuple[Delta | Finished, ...] | None:
        """The events that are new in this part; None when tokens before it are missing (read the journal).

        A finish whose tokens have not all arrived also counts as a hole, so that no answer ends short.
        """
        if self.finished:
            return ()
        if first_index > self.next_index:
            return None
        fresh = token_ids[self.next_index - first_index :]
        if finish is None:
            return (self._delta(fresh, ""),) if fresh else ()
        return self._end(fresh, finish, detail)

    def _end(self, fresh: tuple[int, ...], finish: FinishReason, detail: str) -> tuple[Delta | Finished, ...]:
        first = self.next_index
        pushed = self._push(fresh)
        tail = pushed + self._text.finish(finish)
        self.finished = True
        end = Finished(self.choice, finish, self._prompt_tokens, self.next_index, detail)
        return (Delta(self.choice, first, fresh, tail), end) if fresh or tail else (end,)

    def _delta(self, fresh: tuple[int, ...], tail: str) -> Delta:
        first = self.next_index
        return Delta(self.choice, first, fresh, self._push(fresh) + tail)

    def _push(self, fresh: tuple[int, ...]) -> str:
        self.next_index += len(fresh)
        return self._text.push(fresh) if fresh else ""
