"""Vectorised attention for CPUs, built on torch's tiled `scaled_dot_product_attention`.

In a batch of decodes the query heads of one KV head stand as that head's query rows, so grouped-query attention needs
no copy of keys. Keys are gathered block-wise into a workspace that lives as long as the worker: fresh large tensors
would cost a page fault per 4 KiB in every layer. A sequence that alone fills its call and whose blocks happen to be
adjacent is read in place.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from workers.attention.cpu_plan import Call, CallPlanner
from workers.attention.interface import AttentionSpec, AttentionUnavailable, PagedBatch
from workers.attention.softcap import softcapped_attention


class CpuAttention:
    name = "cpu"

    def __init__(self, spec: AttentionSpec) -> None:
        if spec.device.type != "cpu":
            raise AttentionUnavailable(f"it runs on the CPU only, not on {spec.device.type}")
        self._spec = spec
        self._workspace = Workspace(spec.dtype)

    def prepare(self, batch: PagedBatch) -> CpuPass:
        return CpuPass(self._spec, batch, self._workspace)


class Workspace:
    """One tensor that grows to the largest need and stays."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._tensor = torch.empty(0, dtype=dtype)

    def room(self, numel: int) -> Tensor:
        """Flat, at least `numel` long, of unspecified content."""
        if self._tensor.numel() < numel:
            self._tensor = torch.empty(numel, dtype=self._tensor.dtype)
        return self._tensor


class CpuPass:
    """Plans each window at its first use: the layers that share it share the plan."""

    def __init__(self, spec: AttentionSpec, batch: PagedBatch, workspace: Workspace) -> None:
        self._spec = spec
        self._batch = batch
        self._workspace = workspace
        self._longest = max(batch.key_lens)
        self._plans: dict[tuple[int | None, bool], tuple[Call, ...]] = {}

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
        calls = self._plan(window, explicit_masks=softcap is not None)
        if len(calls) == 1 and calls[0].rows is None:
            return self._run(calls[0], query, key_cache, value_cache, scale, softcap)
        out = torch.empty_like(query)
        for call in calls:
            if call.rows is None:
                part = slice(call.first_row, call.first_row + call.num_rows)
                out[part] = self._run(call, query[part], key_cache, value_cache, scale, softcap)
            else:
                picked = query.index_select(0, call.rows)
                out.index_copy_(0, call.rows, self._run(call, picked, key_cache, value_cache, scale, softcap))
        return out

    def _plan(self, window: int | None, explicit_masks: bool) -> tuple[Call, ...]:
        if window is not None and window >= self._longest:
            window = None
        key = (window, explicit_masks)
        if key not in self._plans:
            spec = self._spec
            self._plans[key] = CallPlanner(self._batch, spec.block_size, spec.dtype, window, explicit_masks).calls()
        return self._plans[key]

    def _run(
        self, call: Call, query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float, softcap: float | None
    ) -> Tensor:
        keys, values = self._read(call, key_cache, value_cache)
        kv_heads = self._spec.num_kv_heads
        if softcap is not None:
            # [sequences, rows of each, kv_heads, group, head_dim], then rows behind the group
            grouped = query.view(call.sequences, -1, kv_heads, query.shape[1] // kv_heads, query.shape[2])
            mask = call.mask[:, :, None] if call.mask is not None and call.sequences > 1 else call.mask
            capped = softcapped_attention(
                grouped.permute(0, 2, 3, 1, 4), keys, values, mask, scale=scale, softcap=softcap
            )
            return capped.permute(0, 3, 1, 2, 4).reshape(query.shape)
        if call.sequences > 1:
            grouped = query.view(call.num_rows, kv_heads, -1, query.shape[-1])
            batched = scaled_dot_product_attention(grouped, keys, values, attn_mask=call.mask, scale=scale)
            return batched.reshape(query.shape)
        attended = scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            keys,
            values,
            attn_mask=call.mask,
            is_causal=call.causal,
            scale=scale,
            enable_gqa=query.shape[1] != kv_heads,
        )
        return attended[0].transpose(0, 1)

    def _read(self, call: Call, key_cache: Tensor, value_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values as `[sequences, kv_heads, num_keys, head_dim]`."""
        head_dim = key_cache.shape[-1]
        if call.in_place >= 0:
            slots = slice(call.in_place, call.in_place + call.num_keys)
            keys, values = key_cache.flatten(0, 1)[slots], value_cache.flatten(0, 1)[slots]
            return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
        block_numel = key_cache[0].numel()
        half = len(call.blocks) * block_numel
        workspace = self._workspace.room(2 * half)
        seen = slice(call.skip, call.skip + call.num_keys)
        read = []
        for cache, start in ((key_cache, 0), (value_cache, half)):
            room = workspace[start : start + half].view(len(call.blocks), block_numel)
            torch.index_select(cache.flatten(1), 0, call.blocks, out=room)
            gathered = room.view(call.sequences, -1, self._spec.num_kv_heads, head_dim)
            read.append(gathered[:, seen].transpose(1, 2))
        return read[0], read[1]
