"""A call as an ingress parsed it: well-typed, protocol-free, not yet checked against the model or the cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.sampling import SamplingParams


@dataclass(frozen=True)
class TextPrompt:
    """Text to continue; the tokenizer adds what the model wants in front."""

    text: str


@dataclass(frozen=True)
class TokenPrompt:
    """Token ids as they are."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class ChatPrompt:
    """Messages for the model's chat template, with the fields OpenAI gives them."""

    messages: tuple[Mapping[str, object], ...]


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True)
class Call:
    """What a client asked for. An empty `model` means the only one there is."""

    model: str
    prompt: Prompt
    sampling: SamplingParams
    deadline_ms: int | None = None
    """From now; None: no deadline."""
    tenant: str = "default"
    client_request_id: str = ""
    """What the client calls its request: only logged, never a key."""
    prompt_field: str = "prompt"
    """The name the ingress has for the prompt, so that a refusal names what the client wrote."""
    max_tokens_field: str = "max_tokens"
    grammar_field: str = "grammar"
    n: int = 1
    """Choices the client is shown."""
    best_of: int | None = None
    """Choices that are computed, of which the `n` likeliest are shown; None: `n`."""
    priority: int = 0
    """Band of the queue; 0 is the most urgent."""

    @property
    def computed_choices(self) -> int:
        return self.n if self.best_of is None else self.best_of
