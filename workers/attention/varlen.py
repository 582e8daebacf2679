"""torch's own FlashAttention over a paged pool (`torch.nn.attention.varlen`, paged since torch 2.13). CUDA only."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workers.attention.interface import AttentionSpec, AttentionUnavailable, PagedBatch


class VarlenAttention:
    name = "varlen"

    def __init__(self, spec: AttentionSpec) -> None:
        if spec.device.type != "cuda":
            raise AttentionUnavailable(f"torch's varlen attention needs a CUDA device, not {spec.device.type}")
        if spec.dtype not in (torch.bfloat16, torch.float16):
            raise AttentionUnavailable(f"torch's varlen attention needs bfloat16 or float16, not {spec.dtype}")
        try:
            from torch.nn.attention.varlen import varlen_attn
        except ImportError as error:
            raise AttentionUnavailable(f"torch {torch.__version__} has no torch.nn.attention.varlen") from error
        if "block_table" not in inspect.signature(varlen_attn).parameters:
            raise AttentionUnavailable(f"the varlen attention of torch {torch.__version__} is not paged")
        if spec.softcap is not None:
            raise AttentionUnavailable(f"the varlen attention of torch {torch.__version__} knows no soft cap")
        self._kernel: Callable[..., Any] = varlen_attn

    def prepare(self, batch: PagedBatch) -> VarlenPass:
        return VarlenPass(batch, self._kernel)


@dataclass(frozen=True)
class VarlenPass:
    batch: PagedBatch
    kernel: Callable[..., Any]

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
        if softcap is not None:
            raise NotImplementedError("torch's varlen attention knows no soft cap")
        return self.kernel(
            query,
            key_cache,
            value_cache,
            self.batch.cu_seqlens_q,
            None,
            max(self.batch.query_lens),
            max(self.batch.key_lens),
            scale=scale,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=query.shape[1] != key_cache.shape[2],
            seqused_k=self.batch.seqused_k,
            block_table=self.batch.block_table,
            # One split keeps a row independent of the longest sequence beside it (DESIGN section 6).
            num_splits=1,
        )
