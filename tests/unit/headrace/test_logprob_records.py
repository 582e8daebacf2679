"""Records of log probabilities: what is packed comes out, at any index, and the bytes never change by accident."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.codec import decode_logprobs, encode_logprobs, logprob_bytes, tops_of
from headrace.logprobs import NO_LOGPROB, UNTOLD, TokenLogprob

F32 = st.floats(-1e4, 0, width=32)
IDS = st.integers(0, 2**32 - 2)


def told(tops: int) -> st.SearchStrategy[TokenLogprob]:
    top = st.lists(st.tuples(IDS, F32), min_size=tops, max_size=tops).map(tuple)
    return st.just(UNTOLD) | st.builds(TokenLogprob, F32, st.integers(1, 2**32 - 1), top)


RUNS = st.integers(0, 20).flatmap(lambda tops: st.tuples(st.just(tops), st.lists(told(tops), max_size=6).map(tuple)))


@given(RUNS)
def test_what_is_packed_comes_out_at_any_index(run: tuple[int, tuple[TokenLogprob, ...]]) -> None:
    tops, logprobs = run
    if all(one is UNTOLD for one in logprobs):
        tops = 0
    packed, size = encode_logprobs(logprobs), logprob_bytes(tops)
    assert len(packed) == size * len(logprobs)
    assert tops_of(size) == tops
    for index in range(len(logprobs) + 1):
        assert decode_logprobs(packed[index * size :], tops) == logprobs[index:]


def test_golden_bytes() -> None:
    told = TokenLogprob(-0.5, 2, ((7, -0.25), (9, -0.5)))
    assert encode_logprobs((told,)).hex() == "000000bf0200000007000000000080be09000000000000bf"


def test_zeros_say_that_there_is_none() -> None:
    """As SETRANGE leaves them in a hole."""
    assert decode_logprobs(bytes(2 * logprob_bytes(3)), 3) == (UNTOLD, UNTOLD)


def test_fewer_likeliest_ids_than_a_record_holds_are_padded() -> None:
    short, whole = TokenLogprob(-1.0, 1, ((4, -1.0),)), TokenLogprob(-2.0, 2, ((4, -1.0), (6, -2.0)))
    assert decode_logprobs(encode_logprobs((UNTOLD, short, whole)), 2) == (UNTOLD, short, whole)


@pytest.mark.parametrize("size", [0, 7, 12, -8])
def test_sizes_that_no_record_has_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match="no record"):
        tops_of(size)


def test_a_cut_record_is_refused() -> None:
    packed = struct.pack("<fI", NO_LOGPROB, 0) + b"\0"
    with pytest.raises(ValueError, match="no whole number"):
        decode_logprobs(packed, 0)
