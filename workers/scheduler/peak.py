"""The exact peak test: the most blocks a set of sequences will hold at once, given how much each still has to come.

From LightLLM (and the past-future scheduling paper): sort by tokens still to come, b, descending. When the i-th ends,
the first i are alive and each has grown by b_i, so the need there is Σ_{k≤i} a_k + i·b_i, and the peak is the largest
of these. Far tighter than Σ (a + b), because sequences that end early give their blocks to those that go on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
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
    for alive, entry in enumerate(longest_first, start=1):
        slots += entry.slots_now
        peak = max(peak, slots + alive * (entry.to_come + block_size - 1))
    return peak // block_size


def earliest_start(running: list[Growth], newcomer: Growth, block_size: int, total_blocks: int) -> int:
    """In how many tokens per sequence from now the newcomer passes the peak test, if all end as estimated.

    `running` is sorted longest-lived first. Room comes when sequences end, so their ends are searched, by bisection:
    the newcomer passes at the end found and not at the one before. (Need does not fall quite monotonically, because a
    later start overlaps with longer sequences: an even earlier end may have passed too.)
    """
    ends = sorted({0, *(entry.to_come + 1 for entry in running)})

    def fits(tokens: int) -> bool:
        later = sorted([*survivors(running, tokens), newcomer])
        return peak_blocks(later, block_size) <= total_blocks

    at = bisect_left(ends, True, key=fits)
    return ends[min(at, len(ends) - 1)]


def survivors(running: Iterable[Growth], tokens: int) -> list[Growth]:
    """What the sequences alive after each has grown by `tokens` look like then."""
    return [
        Growth(entry.minus_to_come + tokens, entry.slots_now + tokens) for entry in running if entry.to_come >= tokens
    ]
