"""Who asks what, and when: loads that show one difference between the policies each, and one that mixes them."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from benchmarks.arrivals import poisson_arrivals_s
from benchmarks.lengths import parse_lengths


@dataclass(frozen=True)
class Ask:
    """One request; it ignores EOS, so its output has exactly `output_tokens`."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class LabWorkload:
    """`chunk_tokens` and `max_sequences` are the engine's, for all policies alike; a full batch is the smaller of
    `max_sequences` and 32."""

    name: str
    about: str
    asks: tuple[Ask, ...]
    chunk_tokens: int = 512
    max_sequences: int = 32

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return max(ask.prompt_tokens + ask.output_tokens for ask in self.asks)

    @property
    def output_tokens(self) -> int:
        return sum(ask.output_tokens for ask in self.asks)


def _padding() -> LabWorkload:
    asks = (Ask(0.0, 50, 1), Ask(0.0, 4_000, 1))
    return LabWorkload("padding", "a prompt of 50 tokens beside one of 4,000, one token out", asks)


def _slots(name: str, short: int, long: int) -> LabWorkload:
    asks = (*(Ask(0.0, 16, short) for _ in range(31)), Ask(0.0, 16, long))
    return LabWorkload(name, f"31 outputs of {short} tokens beside one of {long:,}", asks)


def _late() -> LabWorkload:
    first = tuple(Ask(0.0, 32, 96) for _ in range(4))
    late = tuple(Ask(1.0 + 0.25 * i, 32, 8) for i in range(8))
    about = "4 long answers of 96 tokens; from 1 s on 8 short ones of 8 tokens come, one every 0.25 s"
    return LabWorkload("late", about, first + late, max_sequences=4 + 8)


def _prefill() -> LabWorkload:
    decoding = tuple(Ask(0.0, 32, 96) for _ in range(6))
    reading = tuple(Ask(1.0 + 2.0 * i, 1_024, 2) for i in range(3))
    about = "6 answers of 96 tokens; prompts of 1,024 tokens come at 1, 3 and 5 s; chunks of 64"
    return LabWorkload("prefill", about, decoding + reading, chunk_tokens=64)


def _mixed(requests: int = 32, rate_per_s: float = 2.0, seed: int = 0) -> LabWorkload:
    prompts, outputs = parse_lengths("lognormal:64:0.9:8:512"), parse_lengths("lognormal:32:0.8:4:160")
    rng = Random(f"{seed} lab mixed")
    arrivals = poisson_arrivals_s(rate_per_s, requests, rng)
    asks = tuple(Ask(at_s, prompts.draw(rng), outputs.draw(rng)) for at_s in arrivals)
    about = f"{requests} heavy-tailed requests, {rate_per_s:g} a second: prompts around 64, outputs around 32 tokens"
    return LabWorkload("mixed", about, asks, chunk_tokens=256)


WORKLOADS = {
    made.name: made
    for made in (
        _padding(),
        _slots("slots", 20, 2_000),
        _slots("slots-tenth", 2, 200),
        _late(),
        _prefill(),
        _mixed(),
    )
}
