"""One choice of one request, as scheduling sees it: the gap between known and computed tokens, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from headrace.store.limits import BAND_HORIZON_MS, BANDS

MOST_PREEMPTIONS_IN_A_ROW = 2
"""So often a sequence may lose its blocks without having sampled a token in between; then it is nobody's victim."""


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
    """Arrival order in this worker."""
    band: int
    """Priority: 0 is the highest."""
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
    turn_s: float = 0.0
    """Clock time by which it takes its place among the waiting: `turn_of` its arrival and band. Kept through
    preemption."""
    advanced_s: float = 0.0
    """Clock time at which it last advanced or started waiting."""
    arrived_iteration: int = 0
    advanced_iteration: int = 0
    """0 until it has run here."""
    overtaken: int = 0
    """How many of those behind it were started while it waited."""
    due_s: float | None = None
    """Clock time at which its next token is due; None before its first one and where no pace is to be kept."""
    preempted_in_a_row: int = 0
    """How often it lost its blocks since it last sampled a token."""

    @property
    def gap(self) -> int:
        return self.known - self.computed

    @property
    def output_tokens(self) -> int:
        return self.known - self.prompt_tokens

    @property
    def most_to_come(self) -> int:
        """Output tokens that `max_tokens` leaves; at least 1, because every running sequence samples once more."""
        return max(1, self.max_tokens - self.output_tokens)

    @property
    def place(self) -> tuple[float, int]:
        """The order in which sequences wait, and in which those that run get what is left of a step."""
        return self.turn_s, self.rank

    @property
    def is_protected(self) -> bool:
        """It has been preempted as often as may be: it is admitted with its whole length reserved, and stays."""
        return self.preempted_in_a_row >= MOST_PREEMPTIONS_IN_A_ROW


def turn_of(arrived_s: float, band: int) -> float:
    """Each band waits as if it had come one horizon later than the one above, the rule that the store's queues follow:
    a low band ages into its turn instead of starving."""
    return arrived_s + max(0, min(band, BANDS - 1)) * BAND_HORIZON_MS / 1_000
