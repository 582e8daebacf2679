"""The exact peak test: the most blocks a set of sequences will hold at once, given how much each still has to come.

From LightLLM (and the past-future scheduling paper): sort by tokens still to come, b, descending. When the i-th ends,
the first i are alive and each has grown by b_i, so the need there is Σ_{k≤i} a_k + i·b_i, and the peak is the largest
of these. Far tighter than Σ (a + b), because sequences that end early give their blocks to those that go on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple


class Growth(NamedTuple):
    """A sequence to the peak test; ordered so that sorting puts the longest-lived first."""

    minus_to_come: int
    """-(KV slots it will yet add); the last token sampled is never read, so it takes none."""
    slots_now: int

    @property
    def to_come(self) -> int:
        return -self.minus_to_come


def growth(known_tokens: int, output_tokens_to_come: int) -> Growth:
    return Growth(-max(0, output_tokens_to_come - 1), known_tokens)


def peak_blocks(longest_first: Iterable[Growth], block_size: int) -> int:
    """Peak need in blocks of sequences sorted longest-lived first. Σ ⌈x/s⌉ over i sequences is at most ⌊(Σ x +
    i·(s-1)) / s⌋: exact for one, and on average half a block per sequence on the safe side.
    """
    peak = slots = 0
    spare = block_size - 1
    for alive, (minus_to_come, slots_now) in enumerate(longest_first, start=1):
        slots += slots_now
        need = slots + alive * (spare - minus_to_come)
        if need > peak:  # the innermost line of planning: half the time of `max`
            peak = need
    return peak // block_size


def earliest_start(running: list[Growth], newcomer: Growth, block_size: int, total_blocks: int) -> int:
    """In how many tokens per sequence from now the newcomer passes the peak test first, if all end as estimated.

    `running` is sorted longest-lived first. Room comes when sequences end, so every end is tried, soonest first: need
    does not fall monotonically (a later start overlaps with longer sequences), so no end may be skipped. At an end t
    the i longest-lived have grown by t each and need Σ a_k + i·(b_i + s-1) slots, the same as seen from now; those
    that end before the newcomer find it beside them, which adds its slots and one more growth. So the sums are made
    once, and one end costs a maximum over a slice.
    """
    spare = block_size - 1
    before = list(accumulate((entry.slots_now for entry in running), initial=0))
    alone = [before[i] + i * (entry.to_come + spare) for i, entry in enumerate(running, start=1)]
    beside = [slots + entry.to_come for slots, entry in zip(alone, running, strict=True)]
    alone_peak = list(accumulate(alone, max, initial=0))
    room = (total_blocks + 1) * block_size - 1
    for t in sorted({0, *(entry.to_come + 1 for entry in running)}):
        alive = bisect_right(running, -t, key=_minus_to_come)
        longer = bisect_right(running, -t - newcomer.to_come, hi=alive, key=_minus_to_come)
        own = before[longer] + longer * t + newcomer.slots_now + (longer + 1) * (newcomer.to_come + spare)
        shorter = max(beside[longer:alive], default=0) + newcomer.slots_now + spare - t if longer < alive else 0
        if max(own, shorter, alone_peak[longer]) <= room:
            return t
    return max((entry.to_come + 1 for entry in running), default=0)


def reserved_blocks(sequences: Iterable[Growth], block_size: int) -> int:
    """Blocks of sequences that are each given their whole length at once and keep it: no sharing over time."""
    return sum(-((minus_to_come - slots_now) // block_size) for minus_to_come, slots_now in sequences)


def earliest_reserved_start(running: list[Growth], newcomer: Growth, block_size: int, total_blocks: int) -> int:
    """`earliest_start` where everyone keeps its whole length: need falls with every end."""
    kept = list(accumulate((reserved_blocks([entry], block_size) for entry in running), initial=0))
    stay = max(0, bisect_right(kept, total_blocks - reserved_blocks([newcomer], block_size)) - 1)
    return running[stay].to_come + 1 if stay < len(running) else 0


def _minus_to_come(entry: Growth) -> int:
    return entry.minus_to_come


def survivors(running: Iterable[Growth], tokens: int) -> list[Growth]:
    """What the sequences alive after each has grown by `tokens` look like then."""
    return [
        Growth(minus_to_come + tokens, slots_now + tokens)
        for minus_to_come, slots_now in running
        if minus_to_come + tokens <= 0
    ]
