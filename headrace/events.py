"""What a client's stream is made of, whatever the protocol that carries it."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.frame import FinishReason
from headrace.logprobs import TokenLogprob


@dataclass(frozen=True)
class Accepted:
    """The request is in the store: from here on nothing of it is lost."""

    request_id: str
    prompt_tokens: int


@dataclass(frozen=True)
class Delta:
    """New output of one choice. `text` may be empty while a character or a stop string is incomplete."""

    choice: int
    first_index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of `token_ids` where they were asked for, else none."""


@dataclass(frozen=True)
class PromptLogprobs:
    """Of every prompt token; comes once, before the first delta, where it was asked for."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True)
class Finished:
    """A choice ended. `completion_tokens` counts the ids sampled, the stop token included."""

    choice: int
    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    detail: str = ""


Event = Accepted | PromptLogprobs | Delta | Finished
