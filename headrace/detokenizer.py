"""Output tokens to text, a token at a time, without ever showing half a character."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from headrace.tokenizer import Tokenizer

_utf8 = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """The text is a pure function of the tokens so far, however they were split over calls.

    Special tokens are skipped. Bytes that begin a character which later bytes may still complete are held back; bytes
    that no continuation could make valid become U+FFFD, one per maximal invalid part (the Unicode standard's
    practice).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = _utf8("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete; may be empty."""
        tokenizer = self._tokenizer
        raw = b"".join(tokenizer.token_bytes(i) for i in token_ids if not tokenizer.is_special(i))
        return self._decoder.decode(raw)

    def flush(self) -> str:
        """Ends the text. A character left incomplete by the last token is dropped: always "", streamed or not."""
        self._decoder.reset()
        return ""
