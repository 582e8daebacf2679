"""Which kernel calls the ragged rows of one pass become on a CPU, for one window.

Sequences with one query row (decodes) of similar length share one padded call; longer slices (prefill chunks) get one
call each. Under a window a call reads from the block that holds its first visible key on, and masks or skips the slots
before that key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.attention.interface import PagedBatch

CALL_COST_TOKENS = 1024
"""What one more call costs, in padded key slots it could read instead: about 80 µs against 80 ns a slot (2 cores)."""


@dataclass(frozen=True)
class Call:
    """One call of the kernel: a batch of single rows, or the rows of one sequence."""

    rows: Tensor | None
    """Which query rows of a batch, or None when they are `first_row : first_row + num_rows`."""
    first_row: int
    num_rows: int
    sequences: int
    """How many sequences share the call; above 1 each has one row."""
    blocks: Tensor
    """int64: the blocks to gather, sequence by sequence, all equally wide."""
    in_place: int
    """First slot to read where the blocks of the one sequence are adjacent, else -1."""
    skip: int
    """Slots before the first key, in the first block that is gathered."""
    num_keys: int
    """Keys per sequence, with padding."""
    mask: Tensor | None
    """Added to the scores: `[sequences, 1, 1, num_keys]` in a batch, else `[num_rows, num_keys]`."""
    causal: bool
    """The mask is the triangle that kernels know by themselves."""


@dataclass(frozen=True)
class CallPlanner:
    """Plans one pass. `explicit_masks`: for a kernel that has no triangle of its own."""

    batch: PagedBatch
    block_size: int
    dtype: torch.dtype
    window: int | None
    explicit_masks: bool = False

    def calls(self) -> tuple[Call, ...]:
        starts = [0]
        for num_rows in self.batch.query_lens:
            starts.append(starts[-1] + num_rows)
        decodes = [s for s, num_rows in enumerate(self.batch.query_lens) if num_rows == 1]
        read = [keys - self._first_block(s) * self.block_size for s, keys in enumerate(self.batch.key_lens)]
        planned = [
            self._chunk(starts[group[0]], group[0]) if len(group) == 1 else self._decodes(starts, group, read)
            for group in group_by_length(decodes, read)
        ]
        planned += [self._chunk(starts[s], s) for s, num_rows in enumerate(self.batch.query_lens) if num_rows > 1]
        return tuple(planned)

    def _first_visible(self, sequence: int) -> int:
        """Position of the first key that any of its rows sees."""
        if self.window is None:
            return 0
        first_row = self.batch.key_lens[sequence] - self.batch.query_lens[sequence]
        return max(0, first_row + 1 - self.window)

    def _first_block(self, sequence: int) -> int:
        return self._first_visible(sequence) // self.block_size

    def _decodes(self, starts: Sequence[int], group: Sequence[int], read: Sequence[int]) -> Call:
        """`group` holds sequences of one row each, the one that reads the most slots first."""
        size = self.block_size
        width = -(-read[group[0]] // size)
        first_blocks = torch.tensor([self._first_block(s) for s in group])
        last_blocks = torch.tensor([(self.batch.key_lens[s] - 1) // size for s in group])
        wanted = torch.minimum(first_blocks[:, None] + torch.arange(width), last_blocks[:, None])
        blocks = self.batch.block_table.index_select(0, torch.tensor(group)).gather(1, wanted)
        slots = torch.arange(width * size)
        hidden = slots >= torch.tensor([read[s] for s in group])[:, None]
        if self.window is not None:
            skips = torch.tensor([self._first_visible(s) % size for s in group])
            hidden |= slots < skips[:, None]
        mask = torch.zeros(len(group), 1, 1, width * size, dtype=self.dtype)
        mask.masked_fill_(hidden[:, None, None, :], -torch.inf)
        in_order = len(group) == len(self.batch.query_lens) and list(group) == list(range(len(group)))
        rows = None if in_order else torch.tensor([starts[s] for s in group])
        return Call(
            rows=rows,
            first_row=0,
            num_rows=len(group),
            sequences=len(group),
            blocks=blocks.flatten().long(),
            in_place=-1,
            skip=0,
            num_keys=width * size,
            mask=mask,
            causal=False,
        )

    def _chunk(self, first_row: int, sequence: int) -> Call:
        size, num_rows, end = self.block_size, self.batch.query_lens[sequence], self.batch.key_lens[sequence]
        begin = self._first_visible(sequence)
        blocks = self.batch.block_table[sequence, begin // size : -(-end // size)].long()
        first = int(blocks[0])
        adjacent = bool((blocks == torch.arange(first, first + len(blocks))).all())
        causal = num_rows == end and (self.window is None or self.window >= end) and not self.explicit_masks
        return Call(
            rows=None,
            first_row=first_row,
            num_rows=num_rows,
            sequences=1,
            blocks=blocks,
            in_place=first * size + begin % size if adjacent else -1,
            skip=begin % size,
            num_keys=end - begin,
            mask=None if causal or num_rows == 1 else self._triangle(begin, end - num_rows, end),
            causal=causal,
        )

    def _triangle(self, first_key: int, first_row: int, end: int) -> Tensor:
        """For the rows at positions `first_row : end` over the keys at `first_key : end`."""
        keys, rows = torch.arange(first_key, end), torch.arange(first_row, end)[:, None]
        hidden = keys > rows
        if self.window is not None:
            hidden |= keys <= rows - self.window
        return torch.zeros(end - first_row, end - first_key, dtype=self.dtype).masked_fill_(hidden, -torch.inf)


def group_by_length(sequences: Sequence[int], lens: Sequence[int]) -> list[list[int]]:
    """Cuts sequences, longest first, into groups that are padded to their longest: a new group starts where the padding
    saved is worth one more call. `lens` are the slots each one reads. Pure; the groups partition `sequences`."""
    groups: list[list[int]] = []
    longest = waste = 0
    for sequence in sorted(sequences, key=lambda s: (-lens[s], s)):
        padding = longest - lens[sequence]
        if groups and waste + padding <= CALL_COST_TOKENS:
            groups[-1].append(sequence)
            waste += padding
        else:
            groups.append([sequence])
            longest, waste = lens[sequence], 0
    return groups
