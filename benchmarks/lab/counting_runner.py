"""A model that computes nothing, and the clock that only it moves: counts come out exact and the same everywhere."""

from __future__ import annotations

from collections.abc import Sequence

from workers.kv.moves import Move
from workers.model.interface import Computed, ModelShape, Sampled, SequenceSlice

PASS_S = 0.02
"""Virtual seconds of a pass. They only order arrivals and passes; no figure shows them."""


class VirtualClock:
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def __call__(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds


class CountingRunner:
    """A `ModelRunner` that always says token 1."""

    def __init__(self, clock: VirtualClock, num_blocks: int, max_context: int) -> None:
        self._clock = clock
        self._num_blocks = num_blocks
        self._shape = ModelShape("counting", 49_152, max_context, 0, (), "counting", "counting")

    @property
    def shape(self) -> ModelShape:
        return self._shape

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def scratch_block(self) -> int:
        return self._num_blocks

    @property
    def host_blocks(self) -> int:
        return 0

    @property
    def move_block_s(self) -> float:
        return 0.0

    def forward(self, slices: Sequence[SequenceSlice], moves: Sequence[Move] = ()) -> tuple[Computed, ...]:
        self._clock.sleep(PASS_S)
        return tuple(Computed(Sampled(1) if piece.sample is not None else None) for piece in slices)
