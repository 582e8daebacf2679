"""Attention over a paged KV cache with ragged queries: what every implementation promises.

One pass of the model carries rows of many sequences, flattened. Sequence `s` owns the query rows `cu_seqlens_q[s] :
cu_seqlens_q[s + 1]`; they are the *last* rows of its `seqused_k[s]` tokens, so that query row `i` of `n` sees the keys
`0 .. seqused_k[s] - n + i`. The layout is FlashAttention's varlen one, so that its kernels fit as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionSpec:
    """What an implementation must cope with; fixed for the life of a worker."""

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    """Token slots per block."""
    windows: tuple[int | None, ...] = (None,)
    """The windows its calls will have, each once; None is the whole context."""
    softcap: float | None = None
    """The soft cap of every call."""


@dataclass(frozen=True)
class PagedBatch:
    """The ragged rows of one pass. Tensors are on the worker's device; the tuples repeat lengths on the host,
    so that planning never waits for the device."""

    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    cu_seqlens_q: Tensor
    """int32 `[sequences + 1]`."""
    seqused_k: Tensor
    """int32 `[sequences]`: tokens in the cache once this pass has written its own."""
    block_table: Tensor
    """int32 `[sequences, widest]`; short rows are filled up with their own first block, never read past `seqused_k`."""
    slots: Tensor
    """int64 `[rows]`: where each row's key and value go, as block × block_size + offset."""


class AttentionPass(Protocol):
    """One pass, planned once and used by every layer."""

    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """`query` is `[rows, heads, head_dim]`, the caches `[num_blocks, block_size, kv_heads, head_dim]`; this pass's
        keys and values are already in them. Returns `[rows, heads, head_dim]` in the query's dtype.

        `window`: a row sees itself and the `window - 1` keys before it; None: all before it. `softcap`: a scaled score
        s becomes softcap · tanh(s / softcap) before the mask. Both are among those of the spec.
        """
        ...


class PagedAttention(Protocol):
    """An implementation. Used by one thread."""

    @property
    def name(self) -> str: ...

    def prepare(self, batch: PagedBatch) -> AttentionPass:
        """Does whatever does not depend on the layer."""
        ...


class AttentionUnavailable(Exception):
    """This implementation cannot run here; the message is a clause that completes "… because"."""


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Puts `[rows, kv_heads, head_dim]` into the slots of the two caches."""
    key_cache.flatten(0, 1).index_copy_(0, slots, key)
    value_cache.flatten(0, 1).index_copy_(0, slots, value)
