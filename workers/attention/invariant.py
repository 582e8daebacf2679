"""Row-invariant attention for CPUs: a row gets the same bits alone, in any batch, at any chunk border.

What makes stock kernels vary is how they cut sums: by the number of query rows, by the longest neighbour, by the end of
the chunk. Here nothing of a row's arithmetic depends on these. Keys are cut at multiples of KEY_SPLIT counted from
position 0, each split is one product of fixed depth, and the splits are added in order; a split the row cannot see adds
exact zeros. Query rows go into every product in multiples of LINE_TILE, because small matrices take other code paths.
The maximum of a row is exact in any order, so no running rescale is needed. All in float32, whatever the cache holds.

The idea of fixed KV splits is that of the batch-invariant kernels of Thinking Machines Lab.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from workers.attention.cpu_plan import group_by_length
from workers.attention.interface import AttentionSpec, AttentionUnavailable, PagedBatch

KEY_SPLIT = 128
"""Keys per partial sum; a multiple of it, from position 0, is where every split begins."""
LINE_TILE = 16
"""Products get a multiple of so many query lines (rows × query heads of one KV head)."""
SCORES_AT_ONCE = 1 << 22
"""Scores that one call may hold (16 MiB in float32): a chunk beside a long context is cut by rows."""


class InvariantAttention:
    name = "invariant"

    def __init__(self, spec: AttentionSpec) -> None:
        if spec.device.type != "cpu":
            raise AttentionUnavailable(f"it runs on the CPU only, not on {spec.device.type}")
        self._spec = spec

    def prepare(self, batch: PagedBatch) -> InvariantPass:
        return InvariantPass(batch, self._spec)


@dataclass(frozen=True)
class _Call:
    """`sequences` × `rows_each` query rows against as many keys of each sequence."""

    rows: Tensor
    """int64 `[sequences × rows_each]`: which query rows of the pass."""
    rows_each: int
    slots: Tensor
    """int64 `[sequences, keys]`; keys beyond a sequence's end name its own first slot, and are hidden."""
    hidden: Tensor
    """bool `[sequences, lines, keys]`: nothing is hidden from the lines that fill up the last tile."""


@dataclass
class InvariantPass:
    batch: PagedBatch
    spec: AttentionSpec
    _calls: dict[int | None, tuple[_Call, ...]] = field(default_factory=dict)
    """By window; layers with the same window share them."""

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
        """See `AttentionPass.attend`."""
        if window not in self._calls:
            self._calls[window] = tuple(self._plan(window))
        keys, values = key_cache.flatten(0, 1), value_cache.flatten(0, 1)
        out = torch.empty_like(query)
        for call in self._calls[window]:
            out.index_copy_(0, call.rows, self._run(call, query, keys, values, scale, softcap).to(query.dtype))
        return out

    # -- the plan ----------------------------------------------------------------------------------------------------

    def _plan(self, window: int | None) -> list[_Call]:
        first_rows = [0]
        for num_rows in self.batch.query_lens:
            first_rows.append(first_rows[-1] + num_rows)
        single = [s for s, num_rows in enumerate(self.batch.query_lens) if num_rows == 1]
        read = [num_keys - _first_key(num_keys - 1, window) for num_keys in self.batch.key_lens]
        calls = [
            self._call(group, [first_rows[s] for s in group], [self.batch.key_lens[s] - 1 for s in group], 1, window)
            for group in group_by_length(single, read)
        ]
        for sequence, num_rows in enumerate(self.batch.query_lens):
            if num_rows > 1:
                calls += self._chunk(sequence, first_rows[sequence], window)
        return calls

    def _chunk(self, sequence: int, first_row: int, window: int | None) -> list[_Call]:
        """A chunk's rows, cut so that no call holds more than SCORES_AT_ONCE."""
        num_rows, num_keys = self.batch.query_lens[sequence], self.batch.key_lens[sequence]
        at_once = max(1, SCORES_AT_ONCE // (self.spec.num_heads * (num_keys + KEY_SPLIT)))
        return [
            self._call(
                [sequence],
                [first_row + done],
                [num_keys - num_rows + done],
                min(at_once, num_rows - done),
                window,
            )
            for done in range(0, num_rows, at_once)
        ]

    def _call(
        self,
        sequences: Sequence[int],
        first_rows: Sequence[int],
        first_positions: Sequence[int],
        rows_each: int,
        window: int | None,
    ) -> _Call:
        """For each sequence, `rows_each` rows from its `first_rows` on, which stand at `first_positions` on."""
        size = self.spec.block_size
        begins = torch.tensor([_first_key(position, window) for position in first_positions])
        ends = torch.tensor(first_positions) + rows_each
        width = _rounded_up(int((ends - begins).max()), KEY_SPLIT)
        positions = begins[:, None] + torch.arange(width)
        tables = self.batch.block_table.index_select(0, torch.tensor(sequences)).long()
        blocks = tables.gather(1, (positions // size).clamp(max=tables.shape[1] - 1))
        slots = torch.where(positions < ends[:, None], blocks * size + positions % size, tables[:, :1] * size)
        standing = torch.tensor(first_positions)[:, None] + torch.arange(rows_each)
        hidden = positions[:, None, :] > standing[:, :, None]
        if window is not None:
            hidden |= positions[:, None, :] <= standing[:, :, None] - window
        hidden = hidden.repeat_interleave(self._group, dim=1)
        hidden = pad(hidden, (0, 0, 0, -hidden.shape[1] % LINE_TILE))
        rows = torch.tensor(first_rows)[:, None] + torch.arange(rows_each)
        return _Call(rows.flatten(), rows_each, slots, hidden)

    # -- one call ----------------------------------------------------------------------------------------------------

    def _run(
        self, call: _Call, query: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None
    ) -> Tensor:
        lines, keys, values = self._lines(call, query), _gathered(keys, call.slots), _gathered(values, call.slots)
        attended = torch.stack(
            [
                _one_kv_head(lines[head], keys[:, :, head], values[:, :, head], call.hidden, scale, softcap)
                for head in range(self.spec.num_kv_heads)
            ],
            dim=1,
        )
        attended = attended[:, :, : call.rows_each * self._group].unflatten(2, (call.rows_each, self._group))
        return attended.transpose(1, 2).reshape(len(call.rows), self.spec.num_heads, -1)

    def _lines(self, call: _Call, query: Tensor) -> Tensor:
        """The query as float32 `[kv_heads, sequences, lines, head_dim]`, filled up to a multiple of LINE_TILE lines."""
        rows = query.index_select(0, call.rows).float()
        rows = rows.view(call.slots.shape[0], call.rows_each, self.spec.num_kv_heads, self._group, -1)
        lines = rows.permute(2, 0, 1, 3, 4).flatten(2, 3)
        return pad(lines, (0, 0, 0, -lines.shape[2] % LINE_TILE))

    @property
    def _group(self) -> int:
        return self.spec.num_heads // self.spec.num_kv_heads


def _one_kv_head(
    lines: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, scale: float, softcap: float | None
) -> Tensor:
    """`[sequences, lines, head_dim]` against `[sequences, keys, head_dim]`."""
    scores = torch.bmm(lines, keys.transpose(1, 2)).mul_(scale)
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    scores.masked_fill_(hidden, -torch.inf)
    weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
    summed = torch.bmm(weights[:, :, :KEY_SPLIT], values[:, :KEY_SPLIT])
    for start in range(KEY_SPLIT, keys.shape[1], KEY_SPLIT):  # in order, so that further splits cannot regroup the sum
        split = slice(start, start + KEY_SPLIT)
        summed.baddbmm_(weights[:, :, split], values[:, split])
    total = weights.unflatten(-1, (-1, KEY_SPLIT)).sum(-1).cumsum(-1)[:, :, -1:]
    return summed.div_(total)


def _gathered(cache: Tensor, slots: Tensor) -> Tensor:
    """`[slots, kv_heads, head_dim]` read at `[sequences, keys]` → float32 `[sequences, keys, kv_heads, head_dim]`."""
    return cache.index_select(0, slots.flatten()).float().unflatten(0, slots.shape)


def _first_key(position: int, window: int | None) -> int:
    """Where the first split begins that a row at `position` can see."""
    return 0 if window is None else max(0, position - window + 1) // KEY_SPLIT * KEY_SPLIT


def _rounded_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
