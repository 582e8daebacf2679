"""The tensors of the paged KV cache. Which block belongs to whom is decided elsewhere (`workers.kv`); here they are
only memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.model import memory
from workers.model.geometry import Geometry


@dataclass(frozen=True)
class PagedKvCache:
    """Per layer, keys and values `[num_blocks, block_size, kv_heads, head_dim]`."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @staticmethod
    def allocate(
        geometry: Geometry, num_blocks: int, block_size: int, device: torch.device, dtype: torch.dtype
    ) -> PagedKvCache:
        """Zeroed, so that slots never written hold numbers, and one block longer than asked for: the scratch block.
        Raises OutOfMemory.
        """
        needed = num_blocks * block_size * geometry.kv_bytes_per_token(dtype.itemsize)
        memory.require(f"a KV cache of {num_blocks} blocks", needed, device)
        shape = (num_blocks + 1, block_size, geometry.num_kv_heads, geometry.head_dim)
        try:
            keys = tuple(torch.zeros(shape, device=device, dtype=dtype) for _ in range(geometry.num_layers))
            values = tuple(torch.zeros(shape, device=device, dtype=dtype) for _ in range(geometry.num_layers))
        except (torch.cuda.OutOfMemoryError, MemoryError) as error:
            raise memory.OutOfMemory(
                f"a KV cache of {num_blocks} blocks ({memory.gib(needed)}) does not fit on {device}"
            ) from error
        return PagedKvCache(keys, values)

    @property
    def num_blocks(self) -> int:
        """Without the scratch block."""
        return self.keys[0].shape[0] - 1

    @property
    def scratch_block(self) -> int:
        """For rows that pad a batch: written, never read by anyone."""
        return self.num_blocks

    def gather(self, block_ids: Sequence[int]) -> Tensor:
        """A copy of whole blocks: `[blocks, 2 · layers, block_size, kv_heads, head_dim]`, keys before values."""
        index = torch.tensor(block_ids, device=self.keys[0].device)
        return torch.stack([cache.index_select(0, index) for cache in (*self.keys, *self.values)], dim=1)

    def put(self, block_ids: Sequence[int], blocks: Tensor) -> None:
        """Overwrites whole blocks with what `gather` gave."""
        index = torch.tensor(block_ids, device=self.keys[0].device)
        for place, cache in enumerate((*self.keys, *self.values)):
            cache.index_copy_(0, index, blocks[:, place])

    def scrub(self, block_ids: Sequence[int]) -> None:
        """Replaces what is not a finite number by 0 in the given blocks.

        A masked slot still takes part as 0 × its value, so NaN left behind by one request would reach the next owner
        of the block. Finite values, perhaps another request's shared prefix, stay as they are.
        """
        index = torch.tensor(block_ids, device=self.keys[0].device)
        for cache in (*self.keys, *self.values):
            cache.index_copy_(0, index, cache.index_select(0, index).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))

    def clear(self, block_ids: Sequence[int]) -> None:
        """Zeroes the given blocks."""
        index = torch.tensor(block_ids, device=self.keys[0].device)
        for cache in (*self.keys, *self.values):
            cache.index_fill_(0, index, 0.0)


def blocks_that_fit(budget_bytes: int, geometry: Geometry, block_size: int, dtype: torch.dtype) -> int:
    """How many blocks a budget holds. Raises OutOfMemory when not even one."""
    block_bytes = block_size * geometry.kv_bytes_per_token(dtype.itemsize)
    if budget_bytes < block_bytes:
        raise memory.OutOfMemory(
            f"no memory for a KV cache: one block takes {memory.gib(block_bytes)}, "
            f"{memory.gib(max(budget_bytes, 0))} are left"
        )
    return budget_bytes // block_bytes
