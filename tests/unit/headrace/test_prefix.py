"""Block hashes are the same in every process, and equal only for equal prefixes under equal conditions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.prefix import block_hashes, hashes_after, root_hash

GOLDEN = ["d97f9943ac2c1928a876b8b294d6d19a", "8fe94583fd477def0e376fb6119c6734"]
IDS = st.lists(st.integers(0, 3), max_size=24)


def test_golden_hashes() -> None:
    assert [h.hex() for h in block_hashes(range(9), 4)] == GOLDEN
    assert block_hashes(range(3), 4) == ()


@given(one=IDS, other=IDS, size=st.integers(1, 5))
def test_hashes_are_shared_as_far_as_the_blocks_are(one: list[int], other: list[int], size: int) -> None:
    for i, (a, b) in enumerate(zip(block_hashes(one, size), block_hashes(other, size), strict=False)):
        end = (i + 1) * size
        assert (a == b) == (one[:end] == other[:end])


def test_what_else_decides_a_block_enters_its_hash() -> None:
    hashes = {
        block_hashes((1, 2), 2, adapter=adapter, weight_version=weights, salt=salt)
        for adapter, weights, salt in [("", "", ""), ("ab", "", ""), ("a", "b", ""), ("", "ab", ""), ("", "", "ab")]
    }
    assert len(hashes) == 5


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="block_size"):
        block_hashes((1,), 0)
    with pytest.raises(ValueError, match="token id"):
        block_hashes((-1,), 1)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=20), st.integers(1, 5), st.integers(0, 20))
def test_a_chain_can_be_continued_from_any_block(tokens: list[int], size: int, block: int) -> None:
    whole = block_hashes(tokens, size, weight_version="w", salt="t")
    cut = min(block, len(whole))
    parent = whole[cut - 1] if cut else root_hash("", "w", "t")
    assert hashes_after(parent, tokens[cut * size :], size) == whole[cut:]
