"""How a part stands in a router's delivery stream: a fixed header, then id, tokens, finish and detail.

Readers walk an entry's parts by their headers, so a part cannot grow a trailer: log probabilities stand beside the
parts, in a field of the entry of their own, each run of records with a header that says to which tokens it belongs.

The worker's side packs each part once; the functions only check, append the tokens to the journal and join what is
meant for one owner. Lua writes the same layout where a part is cut or an end has no frame (`lua/20_binding.lua`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

_HEADER = struct.Struct("<HHIIBH")
"""Bytes of id, choice, first token index, bytes of tokens, of finish, of detail."""
MAX_DETAIL_BYTES = 2_000

PackedPart = tuple[str, int, int, bytes, str, str]
"""id, choice, first token index, packed tokens, finish or "", detail"""


def pack_part(request_id: str, choice: int, first_index: int, tokens: bytes, finish: str, detail: str) -> bytes:
    """`tokens` is four bytes an id; `detail` at most `MAX_DETAIL_BYTES` when encoded."""
    name, reason, sentence = request_id.encode(), finish.encode(), detail.encode()
    header = _HEADER.pack(len(name), choice, first_index, len(tokens), len(reason), len(sentence))
    return header + name + tokens + reason + sentence


def unpack_parts(packed: bytes) -> Iterator[PackedPart]:
    """The parts of one entry, in order."""
    at = 0
    while at < len(packed):
        name, choice, first, tokens, reason, sentence = _HEADER.unpack_from(packed, at)
        at += _HEADER.size
        cuts = (at + name, at + name + tokens, at + name + tokens + reason, at + name + tokens + reason + sentence)
        yield (
            packed[at : cuts[0]].decode(),
            choice,
            first,
            packed[cuts[0] : cuts[1]],
            packed[cuts[1] : cuts[2]].decode(),
            packed[cuts[2] : cuts[3]].decode(),
        )
        at = cuts[3]


_RUN_HEADER = struct.Struct("<HHIHI")
"""Bytes of id, choice, first token index, bytes of one record, of all records."""

PackedLogprobs = tuple[str, int, int, int, bytes]
"""id, choice, first token index, bytes of one record, records (`headrace.codec.encode_logprobs`)"""


def pack_logprobs(request_id: str, choice: int, first_index: int, record_bytes: int, records: bytes) -> bytes:
    name = request_id.encode()
    return _RUN_HEADER.pack(len(name), choice, first_index, record_bytes, len(records)) + name + records


def unpack_logprobs(packed: bytes) -> Iterator[PackedLogprobs]:
    """The runs of one entry, in order."""
    at = 0
    while at < len(packed):
        name, choice, first, record_bytes, size = _RUN_HEADER.unpack_from(packed, at)
        at += _RUN_HEADER.size
        yield packed[at : at + name].decode(), choice, first, record_bytes, packed[at + name : at + name + size]
        at += name + size


def short(detail: str) -> str:
    """The detail cut to what a part may carry, at a character's border."""
    return detail.encode()[:MAX_DETAIL_BYTES].decode(errors="ignore") if detail else ""
