"""What choosing tokens costs: the sampler alone, on random logits, which are flatter than any model's.

python -m benchmarks.sampling --threads 2
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

from headrace.sampling import SamplingParams
from workers.model.interface import SampleSpec
from workers.sampling.sampler import Sampler

PROMPT_TOKENS = 200
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "top-p 0.1": {"top_p": 0.1},
    "top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9},
    "min-p 0.05": {"min_p": 0.05},
    "greedy with penalties": {"temperature": 0.0, "repetition_penalty": 1.2, "presence_penalty": 0.5},
    "greedy with 5 logprobs": {"temperature": 0.0, "logprobs": 5},
}


def seconds(logits: torch.Tensor, params: SamplingParams, steps: int) -> float:
    """Median over `steps` of a stable batch, each row with its own seed; the first three are not counted."""
    rows, vocabulary = logits.shape
    sampler = Sampler(vocabulary, logits.device)
    known = [list(range(PROMPT_TOKENS)) for _ in range(rows)]
    taken_s = []
    for step in range(steps + 3):
        specs = [
            SampleSpec(params, row, 0, step, key=row, tokens=known[row], prompt_tokens=PROMPT_TOKENS)
            for row in range(rows)
        ]
        began_s = time.perf_counter()
        results = sampler.sample(logits, specs)
        taken_s.append(time.perf_counter() - began_s)
        for tokens, result in zip(known, results, strict=True):
            tokens.append(result.token_id)
    return statistics.median(taken_s[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabulary", type=int, default=49_152)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--steps", type=int, default=21)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"ms per step, {options.threads} threads, vocabulary {options.vocabulary}, rows {options.rows}")
    for name, chosen in KINDS.items():
        params = SamplingParams(max_tokens=1, **chosen).validated()
        figures = []
        for rows in options.rows:
            logits = torch.randn(rows, options.vocabulary, generator=torch.Generator().manual_seed(1)) * 3
            figures.append(f"{seconds(logits.to(options.device), params, options.steps) * 1e3:8.2f}")
        print(f"{name:24}", *figures, flush=True)


if __name__ == "__main__":
    main()
