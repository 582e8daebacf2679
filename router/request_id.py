"""Request ids: `<slot tag>-<time-sortable random>`. The tag says which of the store's slots knows the request."""

from __future__ import annotations

import secrets
import time

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
"""Crockford's base 32: no letter that looks like a digit, and ids sort as their times do."""
_TIME_BITS, _RANDOM_BITS, _BITS_PER_CHAR = 50, 80, 5


def mint_request_id(slot_tag: str) -> str:
    """26 characters after the tag: 50 bits of milliseconds since 1970, then 80 random bits (the layout of a ULID)."""
    value = (time.time_ns() // 1_000_000) << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)
    chars = range(_TIME_BITS + _RANDOM_BITS - _BITS_PER_CHAR, -1, -_BITS_PER_CHAR)
    return f"{slot_tag}-" + "".join(_ALPHABET[(value >> shift) & 31] for shift in chars)
