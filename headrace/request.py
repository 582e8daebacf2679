"""A request as it stands in the store: what the router admitted and what a worker needs to run it."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.sampling import SamplingParams


@dataclass(frozen=True)
class Request:
    """One admitted user call.

    `sampling` is resolved: `max_tokens` and `seed` are set. `prompt_token_ids` has at least one id, each inside the
    vocabulary, and prompt + max_tokens fits the context and some worker's pool.
    """

    id: str
    model: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    tenant: str = "default"
    band: int = 0
    """Priority band, below `BANDS` of `headrace.store.limits`; 0 is the highest."""
    n: int = 1
    """Choices that are computed."""
    best: int = 0
    """How many of them the client is shown, the likeliest first; 0: all, as they come."""
    unknown: dict[str, object] = field(default_factory=dict, compare=False, hash=False)
    """Fields written by a newer release, kept so that passing a record on never strips them."""


@dataclass(frozen=True)
class BoundRequest:
    """A request with its binding, as a worker's link hands it to the engine."""

    request: Request
    epoch: int
    """How often it has been bound; echoed in every part that is reported."""
    owner: str
    """Router incarnation that delivers it."""
    inbox_id: str
    """Id of the inbox entry that brought it."""
    journal: tuple[tuple[int, ...], ...]
    """Per choice, the output tokens already journaled by earlier holders; empty for a fresh request."""
    prompt_is_scored: bool = False
    """The prompt's log probabilities are journaled: told once, they are not told again."""
