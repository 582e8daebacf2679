"""KV blocks in host memory, beside the cache that kernels read."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from workers.kv.moves import Move, MoveKind
from workers.model import memory
from workers.model.kv_cache import PagedKvCache

STAGED_BLOCKS = 16
"""Blocks gathered on the device at once: bounds the memory that moving takes."""
MEASURED_BLOCKS = 16
MEASUREMENTS = 3


@dataclass(frozen=True)
class HostKv:
    """`[slots, 2 · layers, block_size, kv_heads, head_dim]`, keys of all layers before values; pinned beside a GPU, so
    that copies run at the speed of the bus.
    """

    blocks: Tensor

    @staticmethod
    def allocate(cache: PagedKvCache, budget_bytes: int) -> HostKv:
        """As many slots as the budget holds, perhaps none. Raises OutOfMemory when the host has not that much."""
        _, *block_shape = cache.keys[0].shape
        layers = len(cache.keys) + len(cache.values)
        block_bytes = layers * cache.keys[0][0].numel() * cache.keys[0].element_size()
        slots = budget_bytes // block_bytes
        memory.require(f"{slots} KV blocks in host memory", slots * block_bytes, torch.device("cpu"))
        pinned = cache.keys[0].device.type != "cpu"
        return HostKv(torch.empty((slots, layers, *block_shape), dtype=cache.keys[0].dtype, pin_memory=pinned))

    @property
    def slots(self) -> int:
        return self.blocks.shape[0]

    def carry_out(self, cache: PagedKvCache, moves: Sequence[Move]) -> None:
        """Moves whole blocks, in order; neighbours of one kind go together. On a GPU all of it is queued in the
        stream of the pass that follows, and the host does not wait.
        """
        for kind, run in groupby(moves, key=lambda move: move.kind):
            pairs = tuple(run)
            for first in range(0, len(pairs), STAGED_BLOCKS):
                part = pairs[first : first + STAGED_BLOCKS]
                sources, targets = [move.source for move in part], [move.target for move in part]
                if kind is MoveKind.COPY:
                    cache.put(targets, cache.gather(sources))
                elif kind is MoveKind.OUT:
                    self._save(targets, cache.gather(sources))
                else:
                    cache.put(targets, self._load(sources, cache.keys[0].device))

    def measure(self, cache: PagedKvCache) -> float:
        """Seconds that one block takes out and back, the fastest of a few tries; 0.0 without slots. Uses the first
        slots and leaves the cache as it was.
        """
        count = min(MEASURED_BLOCKS, self.slots, cache.num_blocks)
        if count == 0:
            return 0.0
        trip = [Move(MoveKind.OUT, i, i) for i in range(count)] + [Move(MoveKind.BACK, i, i) for i in range(count)]
        return min(self._time_s(cache, trip) for _ in range(1 + MEASUREMENTS)) / count

    def _time_s(self, cache: PagedKvCache, moves: Sequence[Move]) -> float:
        began_s = time.perf_counter()
        self.carry_out(cache, moves)
        if cache.keys[0].device.type == "cuda":
            torch.cuda.synchronize(cache.keys[0].device)
        return time.perf_counter() - began_s

    def _save(self, slots: Sequence[int], staged: Tensor) -> None:
        for slot, block in zip(slots, staged, strict=True):
            self.blocks[slot].copy_(block, non_blocking=True)

    def _load(self, slots: Sequence[int], device: torch.device) -> Tensor:
        staged = torch.empty((len(slots), *self.blocks.shape[1:]), dtype=self.blocks.dtype, device=device)
        for slot, block in zip(slots, staged, strict=True):
            block.copy_(self.blocks[slot], non_blocking=True)
        return staged
