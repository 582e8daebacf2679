"""How requests, journals and load reports are written in the store.

Layouts only grow within one key prefix: a reader keeps the fields it does not know (so two releases can share a
queue) and gives fields that an older writer left out their default. `LAYOUT` rises only when that is impossible; then
the key prefix rises with it. Maps are msgpack, which the store's Lua functions can read; token ids are packed
little-endian u32, so that a journal grows by plain appends and any tail of it can be read by byte offset.
"""

from __future__ import annotations

import dataclasses
import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any

import msgpack

from headrace.errors import HeadraceError
from headrace.frame import LoadReport
from headrace.logprobs import NO_LOGPROB, UNTOLD, TokenLogprob
from headrace.request import Request
from headrace.sampling import Grammar, GrammarKind, SamplingParams

LAYOUT = 1
TOKEN_BYTES = 4
NO_ID = 2**32 - 1
"""Stands where a record of log probabilities has fewer likeliest ids than its width."""

_SAMPLING_FIELDS = tuple(f.name for f in dataclasses.fields(SamplingParams))
_FIRST_SAMPLING_FIELDS = frozenset(_SAMPLING_FIELDS[: _SAMPLING_FIELDS.index("ignore_eos") + 1])
_DEFAULT_SAMPLING = SamplingParams()
_REQUEST_FIELDS = ("v", "id", "model", "prompt", "sampling", "tenant", "band", "n", "best")
_LOAD_PAIRS: dict[str, type[int] | type[float]] = {"waiting_by_reason": int, "waited_s_by_reason": float}
"""Fields of (reason, number) pairs."""
_LOAD_FIELDS = tuple((f.name, str(f.type)) for f in dataclasses.fields(LoadReport) if f.name not in _LOAD_PAIRS)
_LOAD_DEFAULTS: dict[str, object] = {"int": 0, "float": 0.0, "str": "", "bool": False}


def encode_request(request: Request) -> bytes:
    """One map in a fixed field order, the fields of newer releases last."""
    unknown = dict(request.unknown)
    sampling = _sampling_record(request.sampling)
    unknown_sampling = unknown.pop("sampling", {})
    if isinstance(unknown_sampling, Mapping):
        sampling.update(unknown_sampling)
    record = {
        "v": LAYOUT,
        "id": request.id,
        "model": request.model,
        "prompt": encode_tokens(request.prompt_token_ids),
        "sampling": sampling,
        "tenant": request.tenant,
        "band": request.band,
        "n": request.n,
        **({"best": request.best} if request.best else {}),
        **unknown,
    }
    packed: bytes = msgpack.packb(record, use_bin_type=True)
    return packed


def decode_request(record: bytes) -> Request:
    """Raises HeadraceError on bytes that are no request of this layout."""
    fields = _unpack_map(record)
    if fields.get("v") != LAYOUT:
        raise HeadraceError(f"request record has layout {fields.get('v')!r}, this release reads {LAYOUT}")
    try:
        sampling = dict(fields["sampling"])
        unknown = {name: value for name, value in fields.items() if name not in _REQUEST_FIELDS}
        unknown_sampling = {name: value for name, value in sampling.items() if name not in _SAMPLING_FIELDS}
        if unknown_sampling:
            unknown["sampling"] = unknown_sampling
        return Request(
            id=fields["id"],
            model=fields["model"],
            prompt_token_ids=decode_tokens(fields["prompt"]),
            sampling=_sampling_from(sampling),
            tenant=fields.get("tenant", "default"),
            band=fields.get("band", 0),
            n=fields.get("n", 1),
            best=fields.get("best", 0),
            unknown=unknown,
        )
    except (KeyError, TypeError, ValueError) as fault:
        raise HeadraceError(f"request record is damaged: {fault!r}") from fault


def _unpack_map(record: bytes) -> dict[str, Any]:
    try:
        fields = msgpack.unpackb(record, raw=False, strict_map_key=False)
    except (ValueError, msgpack.UnpackException) as fault:
        raise HeadraceError("record is not msgpack") from fault
    if not isinstance(fields, dict):
        raise HeadraceError("record is not a map")
    return fields


def _sampling_record(sampling: SamplingParams) -> dict[str, object]:
    """Fields that came after the first release are written only where they say something: most records stay short."""
    record = {}
    for name in _SAMPLING_FIELDS:
        value = getattr(sampling, name)
        if name in _FIRST_SAMPLING_FIELDS or value != getattr(_DEFAULT_SAMPLING, name):
            record[name] = [value.kind.value, value.text] if isinstance(value, Grammar) else value
    return record


def _sampling_from(fields: Mapping[str, Any]) -> SamplingParams:
    known = {name: fields[name] for name in _SAMPLING_FIELDS if name in fields}
    for name in ("stop", "stop_token_ids"):
        known[name] = tuple(known.get(name, ()))
    known["logit_bias"] = tuple((int(token), float(bias)) for token, bias in known.get("logit_bias", ()))
    if known.get("grammar") is not None:
        kind, text = known["grammar"]
        known["grammar"] = Grammar(GrammarKind(kind), text)
    return SamplingParams(**known)


def encode_tokens(token_ids: tuple[int, ...]) -> bytes:
    """Four bytes an id, little-endian. Raises ValueError for an id outside 0 .. 2**32 - 1."""
    try:
        packed = array("I", token_ids)
    except OverflowError as fault:
        raise ValueError("a token id must be from 0 to 2**32 - 1") from fault
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def decode_tokens(packed: bytes) -> tuple[int, ...]:
    """Raises ValueError where the length is no multiple of four."""
    ids = array("I")
    ids.frombytes(packed)
    if sys.byteorder == "big":
        ids.byteswap()
    return tuple(ids)


@cache
def _logprob_record(tops: int) -> struct.Struct:
    """f32 log probability, u32 rank, then `tops` times u32 id and f32 log probability."""
    return struct.Struct("<fI" + "If" * tops)


def logprob_bytes(tops: int) -> int:
    """The size of one token's record where `tops` of the likeliest ids are told."""
    return _logprob_record(tops).size


def tops_of(record_bytes: int) -> int:
    """How many likeliest ids a record of this size tells. Raises ValueError for a size that no record has."""
    tops, rest = divmod(record_bytes - _logprob_record(0).size, 8)
    if rest or tops < 0:
        raise ValueError(f"no record of log probabilities has {record_bytes} bytes")
    return tops


def encode_logprobs(logprobs: Sequence[TokenLogprob]) -> bytes:
    """Records of one width, that of the longest `top`, so that the record of any token can be read by its index. Rank
    0 (all of a record zero, too) says that there is no log probability."""
    tops = max([len(one.top) for one in logprobs], default=0)
    pack = _logprob_record(tops).pack
    blanks = (NO_ID, NO_LOGPROB)
    return b"".join(
        [
            pack(one.logprob, one.rank, *chain.from_iterable(one.top), *blanks * (tops - len(one.top)))
            for one in logprobs
        ]
    )


def decode_logprobs(packed: bytes, tops: int) -> tuple[TokenLogprob, ...]:
    """Raises ValueError where the length is no multiple of a record's."""
    record = _logprob_record(tops)
    if len(packed) % record.size:
        raise ValueError(f"{len(packed)} bytes are no whole number of records of {record.size}")
    return tuple([_logprob_from(values) for values in record.iter_unpack(packed)])


def _logprob_from(values: tuple[Any, ...]) -> TokenLogprob:
    if values[1] == 0:
        return UNTOLD
    ids = values[2::2]
    top = tuple(zip(ids, values[3::2], strict=True))
    return TokenLogprob(values[0], values[1], top[: ids.index(NO_ID)] if NO_ID in ids else top)


def encode_load(load: LoadReport) -> dict[str, object]:
    """Plain names and numbers for the store's functions to read; what is told by reason is a list of pairs."""
    fields: dict[str, object] = {name: getattr(load, name) for name, _ in _LOAD_FIELDS}
    fields.update({name: [list(pair) for pair in getattr(load, name)] for name in _LOAD_PAIRS})
    return fields


def decode_load(fields: Mapping[str, object]) -> LoadReport:
    """Accepts what Lua makes of a report: whole floats come back as ints, and an empty list as an empty map."""
    known = {name: _number_as(kind, fields.get(name, _LOAD_DEFAULTS[kind])) for name, kind in _LOAD_FIELDS}
    for name, number in _LOAD_PAIRS.items():
        reasons: Any = fields.get(name) or ()
        pairs = reasons.items() if isinstance(reasons, Mapping) else reasons
        known[name] = tuple((str(reason), number(value)) for reason, value in pairs)
    return LoadReport(**known)


def pack_load(load: LoadReport) -> bytes:
    packed: bytes = msgpack.packb(encode_load(load))
    return packed


def unpack_load(packed: bytes) -> LoadReport:
    """Raises HeadraceError on bytes that are no map."""
    return decode_load(_unpack_map(packed))


def _number_as(kind: str, value: Any) -> Any:
    if kind == "int":
        return int(value)
    if kind == "float":
        return float(value)
    return bool(value) if kind == "bool" else str(value)
