"""What row-invariant mode costs: forward passes of the embedded model with it and without, in turns.

python -m benchmarks.row_invariance --dtype bfloat16 --threads 2
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence

from cluster.model_cache import resolve_model
from headrace.sampling import SamplingParams
from workers.config import EngineConfig
from workers.model.interface import SampleSpec, SequenceSlice
from workers.model.loader import load_runner
from workers.model.runner import TorchRunner

BLOCK_SIZE = 16
NUM_BLOCKS = 1_200
PASSES = {
    "decode 1 beside 300 keys": (1, 1, 300),
    "decode 8 beside 300 keys": (8, 1, 300),
    "decode 32 beside 300 keys": (32, 1, 300),
    "prefill 512": (1, 512, 0),
    "prefill 512 after 1,024": (1, 512, 1_024),
}
"""Sequences, rows of each, keys before them."""


def slices_of(sequences: int, rows: int, before: int) -> tuple[SequenceSlice, ...]:
    greedy = SampleSpec(SamplingParams(max_tokens=1, temperature=0.0), seed=0, choice=0, token_index=0)
    each = -(-(rows + before) // BLOCK_SIZE)
    return tuple(
        SequenceSlice(
            tuple((31 * i + s) % 40_000 for i in range(rows)), before, tuple(range(s * each, (s + 1) * each)), greedy
        )
        for s in range(sequences)
    )


def seconds(runner: TorchRunner, slices: Sequence[SequenceSlice]) -> float:
    began_s = time.perf_counter()
    runner.forward(slices)
    return time.perf_counter() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    path = str(resolve_model(None).path)
    stock, invariant = (
        load_runner(
            EngineConfig(
                path,
                "cost",
                dtype=options.dtype,
                num_blocks=NUM_BLOCKS,
                block_size=BLOCK_SIZE,
                row_invariant=on,
                threads=options.threads,
            )
        )
        for on in (False, True)
    )
    sys.stdout.write(f"{stock.shape.numerics}; ms a pass, medians of {options.rounds} rounds in turns\n")
    for name, (sequences, rows, before) in PASSES.items():
        slices = slices_of(sequences, rows, before)
        seconds(stock, slices), seconds(invariant, slices)
        pairs = [(seconds(stock, slices), seconds(invariant, slices)) for _ in range(options.rounds)]
        plain, even = (statistics.median(column) * 1e3 for column in zip(*pairs, strict=True))
        ratio = statistics.median(b / a for a, b in pairs)
        sys.stdout.write(f"{name:26} stock {plain:8.1f}   row-invariant {even:8.1f}   ratio {ratio:.2f}\n")


if __name__ == "__main__":
    main()
