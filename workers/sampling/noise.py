"""Counter-based noise: the random number of a token is a function of where the token stands, never of a generator's
state.

So a stream that was preempted, moved to another worker or batched differently draws the same numbers again. The
function is BLAKE2b keyed by nothing, over the little-endian 64-bit words (seed, choice, token index), with the number
of the draw as its salt: stateless, the same on every platform, and about 1 µs a row on the host, where the rest of a
row's sampling parameters are gathered anyway.
"""

from __future__ import annotations

import hashlib
import struct

_WORDS = struct.Struct("<qqq")
_PERSON = b"headrace.sample1"
_UNIT = 2.0**-53


def uniform(seed: int, choice: int, token_index: int, draw: int = 0) -> float:
    """A number in [0, 1) with 53 random bits. `seed` is a signed 64-bit integer; `draw` counts the draws that a token
    takes, where it takes more than one.
    """
    salt = draw.to_bytes(8, "little") if draw else b""
    words = _WORDS.pack(seed, choice, token_index)
    digest = hashlib.blake2b(words, digest_size=8, person=_PERSON, salt=salt).digest()
    return (int.from_bytes(digest, "little") >> 11) * _UNIT
