"""How far one choice has been delivered: every token index exactly once, in order, whatever the parts do.

Parts come from two places, the delivery stream and the journal, late, twice or with holes. Text is made here, as a pure
function of the tokens so far, so that it does not depend on how they were cut into parts. Log probabilities go with
their tokens.
"""

from __future__ import annotations

from typing import Protocol

from headrace.events import Delta, Finished
from headrace.frame import FinishReason
from headrace.logprobs import UNTOLD, TokenLogprob


class TextOfTokens(Protocol):
    """What `headrace.text_stream.TextStream` offers."""

    def push(self, token_ids: tuple[int, ...]) -> str: ...
    def finish(self, reason: FinishReason) -> str: ...


class ChoiceProgress:
    """The delivered prefix of one choice. Not thread-safe: it lives on the event loop."""

    def __init__(self, choice: int, prompt_tokens: int, text: TextOfTokens, tops: int | None = None) -> None:
        self.choice = choice
        self.tops = tops
        """How many likeliest ids come with each token's log probability; None: no log probabilities are told."""
        self.next_index = 0
        self.finished = False
        self._prompt_tokens = prompt_tokens
        self._text = text

    def take(
        self,
        first_index: int,
        token_ids: tuple[int, ...],
        finish: FinishReason | None = None,
        detail: str = "",
        logprobs: tuple[TokenLogprob, ...] = (),
    ) -> tuple[Delta | Finished, ...] | None:
        """The events that are new in this part; None when tokens before it are missing (read the journal).

        A finish whose tokens have not all arrived also counts as a hole, so that no answer ends short. Fewer
        `logprobs` than tokens, as of a worker that tells none, are no hole: the rest stay untold.
        """
        if self.finished:
            return ()
        if first_index > self.next_index:
            return None
        skipped = self.next_index - first_index
        fresh = token_ids[skipped:]
        scores = self._scores(logprobs[skipped : skipped + len(fresh)], len(fresh))
        first = self.next_index
        text = self._push(fresh)
        if finish is None:
            return (Delta(self.choice, first, fresh, text, scores),) if fresh else ()
        text += self._text.finish(finish)
        self.finished = True
        end = Finished(self.choice, finish, self._prompt_tokens, self.next_index, detail)
        return (Delta(self.choice, first, fresh, text, scores), end) if fresh or text else (end,)

    def _scores(self, told: tuple[TokenLogprob, ...], tokens: int) -> tuple[TokenLogprob, ...]:
        if self.tops is None:
            return ()
        return told + (UNTOLD,) * (tokens - len(told))

    def _push(self, fresh: tuple[int, ...]) -> str:
        self.next_index += len(fresh)
        return self._text.push(fresh) if fresh else ""
