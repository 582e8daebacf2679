"""Counter-based noise: the random number of a token is a function of where the token stands, never of a generator's
state.

So a stream that was preempted, moved to another worker or batched differently draws the same numbers again. The
function is BLAKE2b keyed by nothing, over the little-endian 64-bit words (seed, choice, token index): stateless, the
same on every platform, and about 1 µs a row on the host, where the rest of a row's sampling parameters are gathered
anyway.
"""

from __future__ import annotations

import hashlib
import struct

_WORDS = struct.Struct("<qqq")
_PERSON = b"headrace.sample1"
_UNIT = 2.0**-53


def uniform(seed: int, choice: int, token_index: int) -> float:
    """A number in [0, 1) with 53 random bits. `seed` is a signed 64-bit integer."""
    digest = hashlib.blake2b(_WORDS.pack(seed, choice, token_index), digest_size=8, person=_PERSON).digest()
    return (int.from_bytes(digest, "little") >> 11) * _UNIT
