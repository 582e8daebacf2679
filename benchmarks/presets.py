"""Workloads by name: those that other engines were measured with on the same kind of machine (docs/benchmarks.md)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    """Where the two totals are set, they are met exactly: drawn lengths are rescaled to them."""

    about: str
    requests: int
    concurrency: int
    input_tokens: str
    output_tokens: str
    total_input_tokens: int | None = None
    total_output_tokens: int | None = None


PRESETS = {
    "mixed64": Preset(
        "64 heavy-tailed requests at once: 17,181 tokens in, 5,794 out",
        requests=64,
        concurrency=64,
        input_tokens="lognormal:140:1.1:8:1536",
        output_tokens="lognormal:64:0.8:4:512",
        total_input_tokens=17_181,
        total_output_tokens=5_794,
    ),
    "single": Preset("one request alone: 128 in, 128 out", 1, 1, "128", "128"),
    "decode32": Preset("32 requests at once: 64 in, 128 out", 32, 32, "64", "128"),
    "prefill": Preset("16 prompts of 1,024 tokens at once, one token out: read input tokens/s", 16, 16, "1024", "1"),
}
