"""Whole blocks of KV on their way: to another block, to host memory and back."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import pytest
import torch

from headrace.sampling import SamplingParams
from workers.config import EngineConfig
from workers.kv.moves import Move, MoveKind
from workers.model.host_kv import STAGED_BLOCKS, HostKv
from workers.model.interface import SampleSpec, SequenceSlice
from workers.model.kv_cache import PagedKvCache
from workers.model.loader import load_runner

BLOCK = 4
GREEDY = SampleSpec(SamplingParams(max_tokens=1, temperature=0.0), seed=0, choice=0, token_index=0)


class MakeModel(Protocol):
    def __call__(self, model_type: str, poisoned_token: int | None = None, **changes: object) -> Path: ...


def filled_cache(num_blocks: int) -> PagedKvCache:
    shape = (num_blocks + 1, BLOCK, 2, 8)
    generator = torch.Generator().manual_seed(5)
    keys, values = (tuple(torch.randn(shape, generator=generator) for _ in range(3)) for _ in range(2))
    return PagedKvCache(keys, values)


def everything(cache: PagedKvCache) -> torch.Tensor:
    return cache.gather(range(cache.num_blocks))


def block_bytes(cache: PagedKvCache) -> int:
    return 2 * 3 * cache.keys[0][0].numel() * 4


def test_the_budget_decides_how_many_blocks_host_memory_takes() -> None:
    cache = filled_cache(5)
    assert HostKv.allocate(cache, 0).slots == 0
    assert HostKv.allocate(cache, 7 * block_bytes(cache) + 1).slots == 7


@pytest.mark.parametrize("count", [1, 5, STAGED_BLOCKS + 3])
def test_blocks_come_back_from_host_memory_as_they_went(count: int) -> None:
    cache = filled_cache(2 * count)
    host = HostKv.allocate(cache, count * block_bytes(cache))
    before = everything(cache)
    host.carry_out(cache, [Move(MoveKind.OUT, i, count - 1 - i) for i in range(count)])
    cache.clear(range(count))
    host.carry_out(cache, [Move(MoveKind.BACK, count - 1 - i, count + i) for i in range(count)])
    after = everything(cache)
    assert torch.equal(after[count:], before[:count])
    assert not after[:count].any()


def test_moves_are_carried_out_in_their_order() -> None:
    """Block 0 goes out before its place is overwritten twice; what came last stays."""
    cache = filled_cache(4)
    host = HostKv.allocate(cache, block_bytes(cache))
    before = everything(cache)
    host.carry_out(
        cache,
        [
            Move(MoveKind.OUT, 0, 0),
            Move(MoveKind.COPY, 1, 0),
            Move(MoveKind.BACK, 0, 2),
            Move(MoveKind.COPY, 3, 0),
            Move(MoveKind.COPY, 3, 1),
        ],
    )
    after = everything(cache)
    assert torch.equal(after[0], before[3])
    assert torch.equal(after[1], before[3])
    assert torch.equal(after[2], before[0])


def test_measuring_leaves_the_cache_as_it_was() -> None:
    cache = filled_cache(6)
    before = everything(cache)
    assert HostKv.allocate(cache, 4 * block_bytes(cache)).measure(cache) > 0.0
    assert torch.equal(everything(cache), before)
    assert HostKv.allocate(cache, 0).measure(cache) == 0.0


def test_the_pass_reads_what_its_moves_brought(make_model: MakeModel) -> None:
    config = EngineConfig(
        str(make_model("llama")),
        "tiny",
        dtype="float32",
        num_blocks=12,
        block_size=BLOCK,
        threads=1,
        host_kv_bytes=1 << 20,
    )
    runner = load_runner(config)
    assert runner.host_blocks > 4
    tokens = tuple(range(3, 14))
    wanted = runner.forward((SequenceSlice(tokens, 0, (0, 1, 2), GREEDY),))
    moves = [
        Move(MoveKind.OUT, 0, 3),
        Move(MoveKind.OUT, 1, 1),
        Move(MoveKind.BACK, 3, 7),
        Move(MoveKind.BACK, 1, 8),
        Move(MoveKind.COPY, 2, 9),
    ]
    assert runner.forward((SequenceSlice(tokens[10:], 10, (7, 8, 9), GREEDY),), moves) == wanted
    runner.forward((), [Move(MoveKind.COPY, 7, 10), Move(MoveKind.COPY, 8, 11)])
    assert runner.forward((SequenceSlice(tokens[8:], 8, (10, 11, 6), GREEDY),)) == wanted


def test_warming_up_measures_the_way_to_host_memory(make_model: MakeModel) -> None:
    config = EngineConfig(str(make_model("llama")), "tiny", dtype="float32", num_blocks=12, block_size=BLOCK, threads=1)
    without = load_runner(config)
    without.warm_up(16)
    assert (without.host_blocks, without.move_block_s) == (0, 0.0)
