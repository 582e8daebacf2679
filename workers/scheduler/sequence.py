"""One choice of one request, as scheduling sees it: the gap between known and computed tokens, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class SequenceKey(NamedTuple):
    request_id: str
    choice: int


@dataclass(eq=False)
class Sequence:
    """`known` counts prompt + accepted output tokens, `computed` those whose KV is written. There is no phase:
    prefill, chunk, decode and replay after preemption are all "compute part of the gap". Changed by the roster only;
    policies read.
    """

    key: SequenceKey
    rank: int
    """Arrival order in this worker; kept through preemption."""
    band: int
    prompt_tokens: int
    max_tokens: int
    """Output tokens after which it ends, the context's end included."""
    runs_to_the_end: bool
    """True when nothing but `max_tokens` can end it, so its length is known."""
    known: int
    computed: int = 0
    held_blocks: int = 0
    borrowed_blocks: int = 0
    """How many of them, at its head, somebody held already when it was admitted."""
    advanced_s: float = 0.0
    """Clock time at which it last advanced or started waiting."""
    arrived_iteration: int = 0
    advanced_iteration: int = 0
    """0 until it has run here."""
    overtaken: int = 0
    """How many later arrivals were started while it waited."""

    @property
    def gap(self) -> int:
        return self.known - self.computed

    @property
    def output_tokens(self) -> int:
        return self.known - self.prompt_tokens
