"""Vectorised attention for CPUs, built on torch's tiled `scaled_dot_product_attention`.

Sequences with one query row (decodes) are batched: those of similar length share one padded call, in which the query
heads of one KV head stand as that head's query rows, so grouped-query attention needs no copy of keys. Longer slices
(prefill chunks) run one call per sequence. Keys are gathered block-wise into a workspace that lives as long as the
worker: fresh large tensors would cost a page fault per 4 KiB in every layer. A sequence that alone fills its call and
whose blocks happen to be adjacent is read in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from workers.attention.interface import AttentionSpec, AttentionUnavailable, PagedBatch

CALL_COST_TOKENS = 1024
"""What one more call costs, in padded key slots it could read instead: about 80 µs against 80 ns a slot (2 cores)."""


class CpuAttention:
    name = "cpu"

    def __init__(self, spec: AttentionSpec) -> None:
        if spec.device.type != "cpu":
            raise AttentionUnavailable(f"it runs on the CPU only, not on {spec.device.type}")
        self._spec = spec
        self._workspace = torch.empty(0, dtype=spec.dtype)

    def prepare(self, batch: PagedBatch) -> CpuPass:
        starts = [0]
        for num_rows in batch.query_lens:
            starts.append(starts[-1] + num_rows)
        decodes = [s for s, num_rows in enumerate(batch.query_lens) if num_rows == 1]
        calls: list[_Call] = [
            self._decode_call(batch, starts, group) for group in group_by_length(decodes, batch.key_lens)
        ]
        calls += [self._chunk_call(batch, starts[s], s) for s, num_rows in enumerate(batch.query_lens) if num_rows > 1]
        widest = max((call.num_gathered for call in calls), default=0)
        needed = 2 * widest * self._spec.block_size * self._spec.num_kv_heads * self._spec.head_dim
        if self._workspace.numel() < needed:
            self._workspace = torch.empty(needed, dtype=self._spec.dtype)
        return CpuPass(tuple(calls), self._workspace, self._spec.num_kv_heads)

    def _decode_call(self, batch: PagedBatch, starts: Sequence[int], group: Sequence[int]) -> _Call:
        """`group` holds sequences of one row each, the longest first."""
        size = self._spec.block_size
        if len(group) == 1:
            return self._chunk_call(batch, starts[group[0]], group[0])
        width = -(-batch.key_lens[group[0]] // size)
        everyone = len(group) == len(batch.query_lens)
        rows = torch.tensor([starts[s] for s in group])
        blocks = batch.block_table.index_select(0, torch.tensor(group))[:, :width]
        lens = torch.tensor([batch.key_lens[s] for s in group])
        beyond = torch.arange(width * size) >= lens[:, None]
        mask = torch.zeros(len(group), 1, 1, width * size, dtype=self._spec.dtype)
        mask.masked_fill_(beyond[:, None, None, :], -torch.inf)
        in_order = everyone and list(group) == list(range(len(group)))
        return _Call(None if in_order else rows, 0, len(group), blocks.flatten().long(), -1, width * size, mask, False)

    def _chunk_call(self, batch: PagedBatch, first_row: int, sequence: int) -> _Call:
        size, num_rows, num_keys = self._spec.block_size, batch.query_lens[sequence], batch.key_lens[sequence]
        blocks = batch.block_table[sequence, : -(-num_keys // size)].long()
        first = int(blocks[0])
        adjacent = bool((blocks == torch.arange(first, first + len(blocks))).all())
        causal = num_rows == num_keys
        mask = None
        if num_rows > 1 and not causal:
            ahead = torch.arange(num_keys) > torch.arange(num_keys - num_rows, num_keys)[:, None]
            mask = torch.zeros(num_rows, num_keys, dtype=self._spec.dtype).masked_fill_(ahead, -torch.inf)
        return _Call(None, first_row, num_rows, blocks, first * size if adjacent else -1, num_keys, mask, causal)


def group_by_length(sequences: Sequence[int], key_lens: Sequence[int]) -> list[list[int]]:
    """Cuts sequences, longest first, into groups that are padded to their longest: a new group starts where the padding
    saved is worth one more call. Pure; the groups partition `sequences`."""
    groups: list[list[int]] = []
    longest = waste = 0
    for sequence in sorted(sequences, key=lambda s: (-key_lens[s], s)):
        padding = longest - key_lens[sequence]
        if groups and waste + padding <= CALL_COST_TOKENS:
            groups[-1].append(sequence)
            waste += padding
        else:
            groups.append([sequence])
            longest, waste = key_lens[sequence], 0
    return groups


@dataclass(frozen=True)
class _Call:
    """One call of the kernel: a batch of single rows, or the rows of one sequence."""

    rows: Tensor | None
    """Which query rows of a batch, or None when they are `first_row : first_row + num_rows`."""
    first_row: int
    num_rows: int
    blocks: Tensor
    """int64: the blocks to gather, sequence by sequence, all equally wide."""
    in_place: int
    """First slot of the sequence where its blocks are adjacent, else -1."""
    num_keys: int
    """Keys per sequence, with padding."""
    mask: Tensor | None
    causal: bool

    @property
    def num_gathered(self) -> int:
        return 0 if self.in_place >= 0 else len(self.blocks)

    @property
    def is_batch(self) -> bool:
        return len(self.blocks.shape) > 0 and self.mask is not None and self.mask.dim() == 4


@dataclass(frozen=True)
class CpuPass:
    calls: tuple[_Call, ...]
    workspace: Tensor
    num_kv_heads: int

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, *, scale: float) -> Tensor:
        if len(self.calls) == 1 and self.calls[0].rows is None:
            return self._run(self.calls[0], query, key_cache, value_cache, scale)
        out = torch.empty_like(query)
        for call in self.calls:
            if call.rows is None:
                part = slice(call.first_row, call.first_row + call.num_rows)
                out[part] = self._run(call, query[part], key_cache, value_cache, scale)
            else:
                picked = query.index_select(0, call.rows)
                out.index_copy_(0, call.rows, self._run(call, picked, key_cache, value_cache, scale))
        return out

    def _run(self, call: _Call, query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float) -> Tensor:
        keys, values = self._read(call, key_cache, value_cache)
        if call.is_batch:
            grouped = query.view(call.num_rows, self.num_kv_heads, -1, query.shape[-1])
            batched = scaled_dot_product_attention(grouped, keys, values, attn_mask=call.mask, scale=scale)
            return batched.reshape(query.shape)
        attended = scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            keys,
            values,
            attn_mask=call.mask,
            is_causal=call.causal,
            scale=scale,
            enable_gqa=query.shape[1] != self.num_kv_heads,
        )
        return attended[0].transpose(0, 1)

    def _read(self, call: _Call, key_cache: Tensor, value_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values as `[sequences, kv_heads, num_keys, head_dim]`."""
        head_dim = key_cache.shape[-1]
        if call.in_place >= 0:
            slots = slice(call.in_place, call.in_place + call.num_keys)
            keys, values = key_cache.flatten(0, 1)[slots], value_cache.flatten(0, 1)[slots]
            return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
        block_numel = key_cache[0].numel()
        half = len(call.blocks) * block_numel
        read = []
        for cache, start in ((key_cache, 0), (value_cache, half)):
            room = self.workspace[start : start + half].view(len(call.blocks), block_numel)
            torch.index_select(cache.flatten(1), 0, call.blocks, out=room)
            sequences = call.num_rows if call.is_batch else 1
            read.append(room.view(sequences, -1, self.num_kv_heads, head_dim)[:, : call.num_keys].transpose(1, 2))
        return read[0], read[1]
