"""The exact peak test against a simulation that lets every sequence grow token by token."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workers.scheduler.peak import (
    Growth,
    earliest_reserved_start,
    earliest_start,
    growth,
    peak_blocks,
    reserved_blocks,
    survivors,
)

sequences = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60)), max_size=12)


def simulated_peak(pairs: list[tuple[int, int]], block_size: int) -> int:
    """Blocks held at the worst moment; each of (slots now, slots to come) holds until it has grown to its end."""
    longest = max((to_come for _, to_come in pairs), default=0)
    return max(
        (sum(-(-(now + t) // block_size) for now, to_come in pairs if to_come >= t) for t in range(longest + 1)),
        default=0,
    )


@given(sequences)
def test_with_blocks_of_one_slot_it_is_exact(pairs: list[tuple[int, int]]) -> None:
    entries = sorted(Growth(-to_come, now) for now, to_come in pairs)
    assert peak_blocks(entries, 1) == simulated_peak(pairs, 1)


@given(sequences, st.integers(1, 16))
def test_with_larger_blocks_it_is_never_short_and_at_most_a_block_per_sequence_long(
    pairs: list[tuple[int, int]], block_size: int
) -> None:
    entries = sorted(Growth(-to_come, now) for now, to_come in pairs)
    truth = simulated_peak(pairs, block_size)
    assert truth <= peak_blocks(entries, block_size) <= truth + len(pairs)


def test_one_sequence_alone_is_exact_in_blocks() -> None:
    assert peak_blocks([growth(known_tokens=10, output_tokens_to_come=7)], 16) == 1
    assert peak_blocks([growth(known_tokens=10, output_tokens_to_come=8)], 16) == 2


@given(sequences, st.tuples(st.integers(1, 60), st.integers(0, 60)), st.integers(1, 16), st.integers(20, 90))
def test_the_newcomer_passes_at_the_start_found_and_at_no_end_before(
    pairs: list[tuple[int, int]], newcomer: tuple[int, int], block_size: int, total_blocks: int
) -> None:
    running = sorted(Growth(-to_come, now) for now, to_come in pairs)
    entry = Growth(-newcomer[1], newcomer[0])
    start = earliest_start(running, entry, block_size, total_blocks)

    def passes_at(tokens: int) -> bool:
        return peak_blocks(sorted([*survivors(running, tokens), entry]), block_size) <= total_blocks

    ends = sorted({0, *(to_come + 1 for _, to_come in pairs)})
    if passes_at(start):
        assert not any(passes_at(end) for end in ends[: ends.index(start)])
    else:  # not even an empty pool would do by the estimates: then it starts when all are gone
        assert start == ends[-1]
        assert not any(passes_at(end) for end in ends)


@given(sequences, st.tuples(st.integers(1, 60), st.integers(0, 60)), st.integers(1, 16), st.integers(5, 90))
def test_where_all_is_reserved_the_newcomer_starts_as_soon_as_enough_have_ended(
    pairs: list[tuple[int, int]], newcomer: tuple[int, int], block_size: int, total_blocks: int
) -> None:
    running = sorted(Growth(-to_come, now) for now, to_come in pairs)
    entry = Growth(-newcomer[1], newcomer[0])
    start = earliest_reserved_start(running, entry, block_size, total_blocks)
    ends = sorted({0, *(to_come + 1 for _, to_come in pairs)})
    fitting = [end for end in ends if reserved_blocks([*survivors(running, end), entry], block_size) <= total_blocks]
    assert start == (fitting[0] if fitting else ends[-1])
