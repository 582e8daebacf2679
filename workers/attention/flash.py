"""FlashAttention's own packages: `vllm_flash_attn` (blocks of 16), else `flash_attn` (2.x: blocks of 256). CUDA
only.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.attention.interface import AttentionSpec, AttentionUnavailable, PagedBatch

PACKAGES = ("vllm_flash_attn", "flash_attn")
FLASH_ATTN_BLOCK = 256
"""flash_attn 2.x pages only in multiples of this; vLLM's fork lifted it to 16."""


class FlashAttention:
    name = "flash"

    def __init__(self, spec: AttentionSpec) -> None:
        if spec.device.type != "cuda":
            raise AttentionUnavailable(f"FlashAttention needs a CUDA device, not {spec.device.type}")
        if spec.dtype not in (torch.bfloat16, torch.float16):
            raise AttentionUnavailable(f"FlashAttention needs bfloat16 or float16, not {spec.dtype}")
        package, kernel = _find_kernel()
        if package == "flash_attn" and spec.block_size % FLASH_ATTN_BLOCK:
            raise AttentionUnavailable(
                f"flash_attn needs a block size that is a multiple of {FLASH_ATTN_BLOCK}, not {spec.block_size}"
            )
        self._kernel = kernel
        parameters = inspect.signature(kernel).parameters
        if spec.softcap is not None and "softcap" not in parameters:
            raise AttentionUnavailable(f"the installed {package} knows no soft cap")
        self._takes_used = "seqused_k" in parameters

    def prepare(self, batch: PagedBatch) -> FlashPass:
        if self._takes_used:
            return FlashPass(batch, self._kernel, {"seqused_k": batch.seqused_k})
        # Older signatures take the key lengths as differences of cumulative sums, also when the cache is paged.
        cumulative = torch.zeros_like(batch.cu_seqlens_q)
        torch.cumsum(batch.seqused_k, 0, dtype=torch.int32, out=cumulative[1:])
        return FlashPass(batch, self._kernel, {"cu_seqlens_k": cumulative})


def _find_kernel() -> tuple[str, Callable[..., Tensor]]:
    for package in PACKAGES:
        try:
            kernel = importlib.import_module(package).flash_attn_varlen_func
        except (ImportError, AttributeError):
            continue
        if "block_table" in inspect.signature(kernel).parameters:
            return package, kernel
    raise AttentionUnavailable(f"none of the packages {', '.join(PACKAGES)} with a paged kernel is installed")


@dataclass(frozen=True)
class FlashPass:
    batch: PagedBatch
    kernel: Callable[..., Tensor]
    key_lengths: dict[str, Tensor]

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
        features = {} if softcap is None else {"softcap": softcap}
        return self.kernel(
            q=query,
            k=key_cache,
            v=value_cache,
            cu_seqlens_q=self.batch.cu_seqlens_q,
            max_seqlen_q=max(self.batch.query_lens),
            max_seqlen_k=max(self.batch.key_lens),
            softmax_scale=scale,
            causal=True,
            window_size=(-1 if window is None else window - 1, 0),
            block_table=self.batch.block_table,
            **self.key_lengths,
            **features,
        )
