"""What the engine has measured of itself: totals, and how fast it drains."""

from __future__ import annotations

import math
from dataclasses import dataclass

from workers.scheduler.state import StepPlan

SMOOTHING_S = 5.0
"""Busy seconds after which an old measurement weighs 1/e."""


@dataclass
class BatchTotals:
    """What the batching policy makes of the passes, in counts that no clock enters.

    A *slot* is a sequence's place in the batch: one that a batching policy keeps until its batch ends, or that of a
    running sequence. A slot-step is one slot in one iteration; it is wasted where the iteration computed nothing of
    anybody's in that slot. A *row* is one token at one position in a pass, the unit of the model's work.
    """

    slot_steps: int = 0
    slot_steps_wasted: int = 0
    rows: int = 0
    """Rows of sequences: prompt tokens, output tokens read back, and both again after a preemption."""
    padding: int = 0
    """Rows computed beside them only to make passes rectangular."""

    def record(self, plan: StepPlan, running: int) -> None:
        """One iteration of `plan`, with so many sequences running."""
        slots = plan.slots or running
        self.slot_steps += slots
        self.slot_steps_wasted += slots - len(plan.work)
        self.rows += plan.tokens
        self.padding += sum(plan.padding)


class StepStatistics:
    """Written by the engine's thread only. Idle time does not count: the drain rate is what the worker does while it
    has work.
    """

    def __init__(self) -> None:
        self.iterations = 0
        self.step_s = 0.0
        self.prompt_tokens_total = 0
        self.output_tokens_total = 0
        self.preemptions_total = 0
        self.batch = BatchTotals()
        self._recent_tokens = 0.0
        self._recent_s = 0.0

    def record(self, step_s: float, output_tokens: int) -> None:
        """One iteration of `step_s` seconds and the tokens it sampled."""
        self.iterations += 1
        self.step_s = step_s
        self.output_tokens_total += output_tokens
        fade = math.exp(-step_s / SMOOTHING_S)
        self._recent_tokens = self._recent_tokens * fade + output_tokens
        self._recent_s = self._recent_s * fade + step_s

    @property
    def drain_tokens_per_s(self) -> float:
        """Output tokens per busy second, smoothed; 0.0 until known."""
        return self._recent_tokens / self._recent_s if self._recent_s > 0 else 0.0
