"""The delivery stream's layout: what is packed is what comes out, and the bytes never change by accident."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.store.parts import (
    MAX_DETAIL_BYTES,
    pack_logprobs,
    pack_part,
    short,
    unpack_logprobs,
    unpack_parts,
)

parts = st.tuples(
    st.text(min_size=1, max_size=40),
    st.integers(0, 2**16 - 1),
    st.integers(0, 2**32 - 1),
    st.lists(st.binary(min_size=4, max_size=4), max_size=5).map(b"".join),
    st.sampled_from(["", "stop", "length", "deadline"]),
    st.text(max_size=60),
)


@given(st.lists(parts, max_size=6))
def test_joined_parts_come_apart_again(several: list[tuple[str, int, int, bytes, str, str]]) -> None:
    assert list(unpack_parts(b"".join(pack_part(*one) for one in several))) == several


def test_golden_bytes() -> None:
    packed = pack_part("req-1", 2, 7, b"\x01\x00\x00\x00", "stop", "é")
    assert packed.hex() == "0500020007000000040000000402007265712d310100000073746f70c3a9"


runs = st.tuples(
    st.text(min_size=1, max_size=40),
    st.integers(0, 2**16 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(8, 168),
    st.binary(max_size=40),
)


@given(st.lists(runs, max_size=6))
def test_joined_runs_of_log_probabilities_come_apart_again(several: list[tuple[str, int, int, int, bytes]]) -> None:
    assert list(unpack_logprobs(b"".join(pack_logprobs(*one) for one in several))) == several


def test_golden_bytes_of_a_run() -> None:
    """Lua cuts them by the same offsets."""
    assert (
        pack_logprobs("req-1", 2, 7, 8, b"12345678").hex() == "05000200070000000800080000007265712d313132333435363738"
    )


def test_a_long_detail_is_cut_between_characters() -> None:
    cut = short("é" * MAX_DETAIL_BYTES)
    assert cut == "é" * (MAX_DETAIL_BYTES // 2)
    assert short("x" + "é" * MAX_DETAIL_BYTES).encode().decode() == "x" + "é" * (MAX_DETAIL_BYTES // 2 - 1)
