"""Golden bytes pin the layout; fields of other releases survive the passage."""

from __future__ import annotations

import dataclasses
import math

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.codec import decode_load, decode_request, decode_tokens, encode_load, encode_request, encode_tokens
from headrace.errors import HeadraceError
from headrace.frame import LoadReport
from headrace.request import Request
from headrace.sampling import Grammar, GrammarKind, SamplingParams

REQUEST = Request(
    id="m1-0001",
    model="smol",
    prompt_token_ids=(1, 260, 49151),
    sampling=SamplingParams(max_tokens=16, seed=-7, stop=("\n\n",), stop_token_ids=(5,), temperature=0.0),
    tenant="acme",
    band=2,
)
GOLDEN_REQUEST = (
    "88a17601a26964a76d312d30303031a56d6f64656ca4736d6f6ca670726f6d7074c40c0100000004010000ffbf0000a87361"
    "6d706c696e678aaa6d61785f746f6b656e7310aa6d696e5f746f6b656e7300ab74656d7065726174757265cb000000000000"
    "0000a5746f705f70cb3ff0000000000000a5746f705f6b00a473656564f9a473746f7091a20a0aba696e636c7564655f7374"
    "6f705f7374725f696e5f6f7574707574c2ae73746f705f746f6b656e5f6964739105aa69676e6f72655f656f73c2a674656e"
    "616e74a461636d65a462616e6402a16e01"
)
LOAD = LoadReport(
    seq=9, credit_blocks=40, free_slots=3, free_blocks=50, cached_blocks=6, held_blocks=8, total_blocks=64,
    block_size=16, max_context=8192, running=2, waiting=1, uncomputed_tokens=77, step_s=0.25,
    drain_tokens_per_s=31.0, iterations=120, prompt_tokens_total=1000, output_tokens_total=2000,
    preemptions_total=4, draining=False, model="smol", weight_version="w", numerics="n",
    waiting_by_reason=(("blocks", 1),), waited_s_by_reason=(("blocks", 2.0), ("slots", 0.5)),
)  # fmt: skip

SAMPLING = st.builds(
    SamplingParams,
    max_tokens=st.none() | st.integers(1, 2**31 - 1),
    min_tokens=st.integers(0, 9),
    temperature=st.floats(0, 100),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(0, 2**31 - 1),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    stop=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), max_size=3).map(tuple),
    include_stop_str_in_output=st.booleans(),
    stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    min_p=st.floats(0, 1),
    logit_bias=st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(-100, 100)), max_size=3).map(tuple),
    prompt_logprobs=st.none() | st.integers(0, 20),
    grammar=st.none()
    | st.builds(Grammar, st.sampled_from(GrammarKind), st.text(st.characters(exclude_categories=["Cs"]))),
)


def test_golden_request() -> None:
    assert encode_request(REQUEST).hex() == GOLDEN_REQUEST
    assert decode_request(bytes.fromhex(GOLDEN_REQUEST)) == REQUEST


def test_golden_tokens() -> None:
    assert encode_tokens((1, 260, 2**32 - 1)) == bytes.fromhex("0100000004010000ffffffff")
    assert decode_tokens(b"") == ()


@given(
    sampling=SAMPLING,
    ids=st.lists(st.integers(0, 2**32 - 1), min_size=1).map(tuple),
    band=st.integers(0, 9),
    n=st.integers(1, 8),
)
def test_requests_come_back_as_they_went(sampling: SamplingParams, ids: tuple[int, ...], band: int, n: int) -> None:
    request = Request("id", "m", ids, sampling, tenant="日本", band=band, n=n)
    assert decode_request(encode_request(request)) == request


def test_fields_of_a_newer_release_are_kept() -> None:
    fields = msgpack.unpackb(encode_request(REQUEST))
    fields["colour"] = {"deep": [1]}
    fields["sampling"]["mood"] = {"5": 1.5}
    passed = decode_request(msgpack.packb(fields))
    assert passed == REQUEST
    assert msgpack.unpackb(encode_request(passed)) == fields


def test_fields_an_older_release_left_out_get_their_default() -> None:
    fields = msgpack.unpackb(encode_request(REQUEST))
    for name in ("tenant", "band", "n"):
        del fields[name]
    for name in ("ignore_eos", "stop", "top_k"):
        del fields["sampling"][name]
    older = decode_request(msgpack.packb(fields))
    sampling = dataclasses.replace(REQUEST.sampling, stop=())
    assert older == dataclasses.replace(REQUEST, tenant="default", band=0, sampling=sampling)


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        (b"", "not msgpack"),
        (b"\xc1", "not msgpack"),
        (msgpack.packb([1]), "not a map"),
        (msgpack.packb({"v": 2}), "layout 2, this release reads 1"),
        (msgpack.packb({}), "layout None"),
        (msgpack.packb({"v": 1, "id": "x"}), "damaged"),
        (msgpack.packb({"v": 1, "id": "x", "model": "m", "prompt": b"123", "sampling": {}}), "damaged"),
    ],
)
def test_damaged_records_say_so(record: bytes, sentence: str) -> None:
    with pytest.raises(HeadraceError, match=sentence):
        decode_request(record)


@pytest.mark.parametrize("ids", [(-1,), (2**32,)])
def test_ids_outside_u32_are_refused(ids: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="token id"):
        encode_tokens(ids)


def test_load_reports_come_back_as_they_went() -> None:
    assert decode_load(encode_load(LOAD)) == LOAD
    assert decode_load(msgpack.unpackb(msgpack.packb(encode_load(LOAD)))) == LOAD


def test_load_reports_survive_lua() -> None:
    """Lua has one number type and one table type."""
    through = {k: math.floor(v) if v == 31.0 else v for k, v in encode_load(LOAD).items()} | {"waiting_by_reason": {}}
    back = decode_load(through | {"newer": 1, "waited_s_by_reason": [["blocks", 2], ["slots", 0.5]]})
    assert back == dataclasses.replace(LOAD, waiting_by_reason=())
    assert isinstance(back.drain_tokens_per_s, float)
    assert isinstance(back.waited_s_by_reason[0][1], float)


def test_load_report_of_an_older_release_gets_defaults() -> None:
    older = encode_load(LOAD)
    del older["numerics"], older["waiting_by_reason"], older["preemptions_total"], older["waited_s_by_reason"]
    expected = dataclasses.replace(LOAD, numerics="", waiting_by_reason=(), preemptions_total=0, waited_s_by_reason=())
    assert decode_load(older) == expected
