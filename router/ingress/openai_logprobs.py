"""Log probabilities in OpenAI's two shapes, and prompts' in vLLM's. Pure: tokens in, JSON values out.

A token is a string of bytes, which need not be whole characters. Chat has a field for the bytes; its `token` is for
reading. Completions name a token by its text alone, so that text tells the bytes where they are no characters: OpenAI's
`bytes:\\xf0\\x9f`.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from headrace.logprobs import TokenLogprob

LEAST = -9999.0
"""What OpenAI tells for a token that cannot come: JSON has no infinity."""

_utf8 = codecs.getincrementaldecoder("utf-8")

Json = dict[str, object]
Block = dict[str, list[Any] | None]
"""Lists of one length, an item per token."""
Scored = tuple[int, TokenLogprob]
"""A token and how likely it was."""


class TokenBytes(Protocol):
    """What `headrace.tokenizer.Tokenizer` offers."""

    def token_bytes(self, token_id: int) -> bytes: ...
    def is_special(self, token_id: int) -> bool: ...


class TextOffsets:
    """Where in the text each token begins, counted in characters: a token that goes on with a character begins where
    that character does.
    """

    def __init__(self, tokenizer: TokenBytes, *, start: int = 0, text: str | None = None) -> None:
        """`start` is where the first token begins. `text` is that of a prompt, where it is to be shown as it was sent:
        names of special tokens in it count as text.
        """
        self._tokenizer = tokenizer
        self._decoder = _utf8("replace")
        self._text = text
        self._at = start

    def take(self, token_id: int) -> int:
        """The offset of the next token."""
        begins, raw = self._at, self._tokenizer.token_bytes(token_id)
        if not self._tokenizer.is_special(token_id):
            self._at += len(self._decoder.decode(raw))
        elif self._text is not None and self._text.startswith(name := raw.decode("utf-8", "replace"), self._at):
            self._at += len(name)
        if self._text is not None:
            # A tokenizer that changes the text (lower case, other spaces) may count otherwise than the client.
            self._at = min(self._at, len(self._text))
        return begins


def chat_content(tokenizer: TokenBytes, scored: Iterable[Scored]) -> list[Json]:
    """The `logprobs.content` of a chat choice: one entry per token."""
    return [
        {
            **_chat_token(tokenizer, token_id, _number_or_none(one)),
            "top_logprobs": [_chat_token(tokenizer, top_id, _number(logprob)) for top_id, logprob in one.top],
        }
        for token_id, one in scored
    ]


def _chat_token(tokenizer: TokenBytes, token_id: int, logprob: float | None) -> Json:
    raw = tokenizer.token_bytes(token_id)
    return {"token": raw.decode("utf-8", "backslashreplace"), "logprob": logprob, "bytes": list(raw)}


def completion_block(tokenizer: TokenBytes, scored: Sequence[Scored], offsets: TextOffsets, tops: int) -> Block:
    """The `logprobs` of a completion's choice. `tops` 0 leaves out `top_logprobs`, as OpenAI does.

    As there, a token that is not among its `tops` likeliest stands beside them. Tokens of equal bytes share a key: the
    likelier one has it.
    """
    return {
        "tokens": [_token_text(tokenizer, token_id) for token_id, _ in scored],
        "token_logprobs": [_number_or_none(one) for _, one in scored],
        "top_logprobs": [_tops(tokenizer, token_id, one, tops) for token_id, one in scored] if tops else None,
        "text_offset": [offsets.take(token_id) for token_id, _ in scored],
    }


def _tops(tokenizer: TokenBytes, token_id: int, one: TokenLogprob, tops: int) -> Json | None:
    if one.rank == 0:
        return None
    found: Json = {}
    for top_id, logprob in (*one.top[:tops], (token_id, one.logprob)):
        found.setdefault(_token_text(tokenizer, top_id), _number(logprob))
    return found


def prompt_scores(tokenizer: TokenBytes, scored: Sequence[Scored], tops: int) -> list[Json | None]:
    """vLLM's `prompt_logprobs`: per token a map from id to logprob, rank and text; null for the first token."""
    return [_prompt_token(tokenizer, token_id, one, tops) for token_id, one in scored]


def _prompt_token(tokenizer: TokenBytes, token_id: int, one: TokenLogprob, tops: int) -> Json | None:
    if one.rank == 0:
        return None
    told = {top_id: (logprob, rank) for rank, (top_id, logprob) in enumerate(one.top[:tops], start=1)}
    told.setdefault(token_id, (one.logprob, one.rank))
    return {
        str(top_id): {"logprob": _number(logprob), "rank": rank, "decoded_token": _token_text(tokenizer, top_id)}
        for top_id, (logprob, rank) in told.items()
    }


def _token_text(tokenizer: TokenBytes, token_id: int) -> str:
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _number_or_none(one: TokenLogprob) -> float | None:
    return None if one.rank == 0 else _number(one.logprob)


def _number(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST
