"""The chained hash that names a full block of prompt tokens, equal in every process and release.

hash = H(parent, tokens); the chain starts from what else decides a block's KV: adapter, weight version and tenant
salt (DESIGN section 6, "KV"). The idea is vLLM's automatic prefix caching; the fixed key in place of Python's seeded
`hash` is what lets a router compare its own hashes with a worker's.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from headrace.codec import TOKEN_BYTES, encode_tokens

HASH_BYTES = 16
_KEY = b"headrace prefix 1"


def block_hashes(
    token_ids: Sequence[int], block_size: int, *, adapter: str = "", weight_version: str = "", salt: str = ""
) -> tuple[bytes, ...]:
    """One hash of 16 bytes per *full* block of `block_size` tokens, in order; a tail shorter than a block has none.

    Raises ValueError for a block size below 1 or an id outside u32.
    """
    return hashes_after(root_hash(adapter, weight_version, salt), token_ids, block_size)


def hashes_after(parent: bytes, token_ids: Sequence[int], block_size: int) -> tuple[bytes, ...]:
    """The same for tokens that follow the block (or root) of hash `parent`: a chain can be continued block by block."""
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, not {block_size}")
    packed = encode_tokens(tuple(token_ids))
    stride = block_size * TOKEN_BYTES
    hashes = []
    for start in range(0, len(packed) - stride + 1, stride):
        parent = blake2b(parent + packed[start : start + stride], digest_size=HASH_BYTES, key=_KEY).digest()
        hashes.append(parent)
    return tuple(hashes)


def root_hash(adapter: str, weight_version: str, salt: str) -> bytes:
    """Where a chain starts. Each name goes in with its length, so that ("ab", "") and ("a", "b") differ."""
    digest = blake2b(digest_size=HASH_BYTES, key=_KEY)
    for name in (adapter, weight_version, salt):
        raw = name.encode("utf-8")
        digest.update(len(raw).to_bytes(4, "little") + raw)
    return digest.digest()
