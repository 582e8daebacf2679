"""Why each sequence waited, to the nanosecond: every moment of its queue time is charged to exactly one reason.

A plan says for each sequence that it leaves waiting why it does. From then to the next plan, or to the sequence's end,
the time is that reason's. Before its first plan a sequence waits for the iteration's end. Whole nanoseconds, so that
the reasons' sum *is* the queue time and no rounding stands between them.
"""

from __future__ import annotations

from collections import Counter

from workers.scheduler.sequence import SequenceKey
from workers.scheduler.state import StepPlan, Wait

NS = 1_000_000_000


class WaitAccount:
    """Told of every arrival, plan and end, in the order of their times; nothing else is read."""

    def __init__(self) -> None:
        self._open: dict[SequenceKey, tuple[int, Wait]] = {}
        """Of those that wait: since when uncharged, and whose time it is."""
        self._totals_ns: Counter[Wait] = Counter()

    def __len__(self) -> int:
        """How many wait."""
        return len(self._open)

    def arrived(self, key: SequenceKey, now: float) -> None:
        """It waits from here on."""
        self._open[key] = (_ns(now), Wait.BOUNDARY)

    def planned(self, plan: StepPlan, now: float) -> None:
        """Charges everyone up to here, and takes the plan's reasons for what comes. The admitted wait no more; the
        preempted begin to."""
        at_ns = _ns(now)
        for key in plan.admitted:
            self._close(key, at_ns)
        for key, reason in plan.waits:
            self._charge(key, at_ns)
            self._open[key] = (at_ns, reason)

    def ended(self, key: SequenceKey, now: float) -> None:
        """It ended, waiting or not."""
        self._close(key, _ns(now))

    def totals_s(self) -> tuple[tuple[str, float], ...]:
        """Seconds charged so far by reason, the larger unit for people; those that have none are left out."""
        return tuple((reason.value, self._totals_ns[reason] / NS) for reason in Wait if self._totals_ns[reason])

    def totals_ns(self) -> dict[Wait, int]:
        return dict(self._totals_ns)

    def _close(self, key: SequenceKey, at_ns: int) -> None:
        self._charge(key, at_ns)
        self._open.pop(key, None)

    def _charge(self, key: SequenceKey, at_ns: int) -> None:
        if key in self._open:
            since_ns, reason = self._open[key]
            self._totals_ns[reason] += at_ns - since_ns


def _ns(now: float) -> int:
    return round(now * NS)
