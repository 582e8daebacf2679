"""From output tokens to the text a client sees: detokeniser, stop strings and ending tokens in one place.

The worker uses it to know when a stop string completes, the router to make the text: same class, same tokens, same
answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.detokenizer import IncrementalDetokenizer
from headrace.frame import FinishReason
from headrace.sampling import SamplingParams
from headrace.stop import StopMatcher
from headrace.tokenizer import Tokenizer


class TextStream:
    """The text of one choice. What comes after its end is ignored, so replaying a whole journal is always right."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._matcher = StopMatcher(params.stop, params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens
        self._keep_ending = params.include_stop_str_in_output
        self._endings = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else frozenset(tokenizer.eos_token_ids)
        )
        self.stopped = False
        """A stop string completed or an ending token came; further tokens are not part of the output."""
        self.consumed_tokens = 0
        """Tokens taken so far: once stopped, those up to and including the one that ended it."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that may be shown now.

        As in vLLM, ending tokens and stop strings count only beyond the first `min_tokens` tokens (a stop string may
        begin before and complete after), and an ending token's own text is shown only with
        `include_stop_str_in_output`.
        """
        shown = []
        for token_id in token_ids:
            if self.stopped:
                break
            shown.append(self._push_one(token_id))
        return "".join(shown)

    def _push_one(self, token_id: int) -> str:
        self.consumed_tokens += 1
        armed = self.consumed_tokens > self._min_tokens
        ends = armed and token_id in self._endings
        if ends and not self._keep_ending:
            self.stopped = True
            return ""
        text, matched = self._matcher.push(self._detokenizer.push((token_id,)), armed=armed)
        self.stopped = ends or matched
        return text

    def finish(self, reason: FinishReason) -> str:
        """The held-back tail, once the engine has said why the choice ended; nothing where a stop string cut the
        text.

        `reason` is `length`, `cancelled` and the like for a text that was not stopped: all release the same tail, so
        a text never depends on who ended it.
        """
        return self._detokenizer.flush() + self._matcher.flush()
