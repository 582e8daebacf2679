"""What a client's stream is made of, whatever the protocol that carries it."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.frame import FinishReason


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


@dataclass(frozen=True)
class Finished:
    """A choice ended. `completion_tokens` counts the ids sampled, the stop token included."""

    choice: int
    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    detail: str = ""


Event = Accepted | Delta | Finished
