"""Sampling parameters, with their bounds. Downstream of `SamplingParams.validated` no value can be out of range."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from headrace.errors import InvalidRequest
from headrace.unicode import require_unicode

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIASES = 1024
MAX_TOP_LOGPROBS = 20
MAX_GRAMMAR_BYTES = 64 << 10
MAX_CHOICES = 128
"""Most choices that one request computes (`n`, `best_of`); OpenAI's limit."""


class GrammarKind(StrEnum):
    """What the text of a `Grammar` is written in."""

    JSON_SCHEMA = "json_schema"
    """A JSON schema; `{}` stands for any JSON object's value ("JSON mode" asks for `{"type": "object"}`)."""
    REGEX = "regex"
    EBNF = "ebnf"
    CHOICE = "choice"
    """A JSON array of strings, one of which the output is."""


@dataclass(frozen=True)
class Grammar:
    """The language that the output must be in. Whether its text is a grammar at all is judged before admission."""

    kind: GrammarKind
    text: str


@dataclass(frozen=True)
class SamplingParams:
    """How output tokens are chosen and when they end. Names follow OpenAI's and vLLM's.

    `temperature` 0 is greedy: the highest logit, ties to the lowest id. `top_k` 0 means no limit. `max_tokens` None
    means "as many as context and pool allow" and is resolved at admission. `seed` None is replaced at admission by a
    drawn one, so that a request always replays to the same tokens.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    """Ids less likely than `min_p` times the likeliest are left out."""
    presence_penalty: float = 0.0
    """Taken once from the logit of every id in the output so far; OpenAI's definition, prompts do not count."""
    frequency_penalty: float = 0.0
    """Taken as often as the id stands in the output so far."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of ids in prompt or output (CTRL, as in transformers)."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(id, what is added to its logit); -100 bans it, in effect."""
    logprobs: int | None = None
    """Tell the log probability of every output token and of so many of the likeliest; None: of none."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""
    grammar: Grammar | None = None

    def validated(self) -> SamplingParams:
        """Returns self. Raises InvalidRequest naming the first field out of bounds."""
        _whole("max_tokens", self.max_tokens, 1, 2**31 - 1, none_ok=True)
        _whole("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})", field="min_tokens"
            )
        _real("temperature", self.temperature, 0.0, 100.0)
        _real("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _whole("top_k", self.top_k, 0, 2**31 - 1)
        _whole("seed", self.seed, -(2**63), 2**63 - 1, none_ok=True)
        _real("min_p", self.min_p, 0.0, 1.0)
        _real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _real("repetition_penalty", self.repetition_penalty, 0.0, 10.0, open_low=True)
        _whole("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS, none_ok=True)
        _whole("prompt_logprobs", self.prompt_logprobs, 0, MAX_TOP_LOGPROBS, none_ok=True)
        self._check_biases()
        self._check_grammar()
        self._check_stops()
        return self

    def _check_biases(self) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIASES:
            raise InvalidRequest(f"logit_bias has more than {MAX_LOGIT_BIASES} ids", field="logit_bias")
        for token, bias in self.logit_bias:
            _whole("logit_bias", token, 0, 2**31 - 1)
            _real("logit_bias", bias, -100.0, 100.0)

    def _check_grammar(self) -> None:
        if self.grammar is not None and len(self.grammar.text.encode("utf-8", "replace")) > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(f"{self.grammar.kind} is longer than {MAX_GRAMMAR_BYTES} bytes", field="grammar")

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"stop has {len(self.stop)} strings, the limit is {MAX_STOP_STRINGS}", field="stop")
        for i, text in enumerate(self.stop):
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
                raise InvalidRequest(
                    f"stop[{i}] must be a string of 1 to {MAX_STOP_STRING_CHARS} characters", field=f"stop[{i}]"
                )
            require_unicode(text, f"stop[{i}]")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(f"stop_token_ids has more than {MAX_STOP_TOKEN_IDS} ids", field="stop_token_ids")
        for i, token in enumerate(self.stop_token_ids):
            _whole(f"stop_token_ids[{i}]", token, 0, 2**31 - 1)


def _whole(field: str, value: object, low: int, high: int, *, none_ok: bool = False) -> None:
    if value is None and none_ok:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{field} must be a whole number", field=field)
    if not low <= value <= high:
        raise InvalidRequest(f"{field} must be from {low} to {high}, not {value}", field=field)


def _real(field: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InvalidRequest(f"{field} must be a finite number", field=field)
    if value > high or value < low or (open_low and value == low):
        raise InvalidRequest(f"{field} must be {'above' if open_low else 'from'} {low} up to {high}", field=field)
