"""What one run is asked to do."""

from __future__ import annotations

import math
from dataclasses import dataclass

from benchmarks.errors import BenchError
from benchmarks.presets import PRESETS

APIS = ("grpc", "http")
DEFAULT_TARGETS = {"grpc": "127.0.0.1:50051", "http": "http://127.0.0.1:8000"}
DEFAULT_USERS = 8
DEFAULT_REQUESTS = 64
DEFAULT_LENGTH = "128"


@dataclass(frozen=True)
class BenchOptions:
    """None means "the preset's, else the trace's, else the default".

    Load is closed-loop with `concurrency` users; open-loop with Poisson arrivals at `rate_per_s`; or, with a `trace`
    and neither of the two, open-loop at the trace's own arrivals. With a trace and one of the two, only its lengths
    count.
    """

    api: str = "grpc"
    """`grpc` or `http`."""
    target: str = ""
    """host:port for gRPC, a base URL for HTTP; empty: the embedded cluster's default."""
    model: str = ""
    """Empty: the first model that the server lists."""
    preset: str | None = None
    requests: int | None = None
    """How many; of a trace, the first so many rows."""
    concurrency: int | None = None
    rate_per_s: float | None = None
    trace: str | None = None
    time_scale: float = 1.0
    """Factor on the trace's arrival times: 0.5 halves every gap and so doubles the load."""
    input_tokens: str | None = None
    """A length distribution (`benchmarks.lengths.parse_lengths`)."""
    output_tokens: str | None = None
    max_context_tokens: int | None = None
    """Rows of a trace whose prompt + output exceed it are left out, and counted in the report."""
    vocab_size: int = 32_000
    """Prompt ids are drawn below it; any common vocabulary is larger."""
    seed: int = 0
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None
    timeout_s: float = 600.0
    """For the whole run; calls unfinished by then count as errors."""
    save_dir: str = "bench-results"
    """Where the JSON goes; empty: nowhere."""
    label: str = ""
    """A word for this variant, shown by `benchmarks.compare`."""

    def validated(self) -> BenchOptions:
        """Returns self. Raises BenchError naming the first option that cannot be."""
        if self.api not in APIS:
            raise BenchError(f"--api must be one of {', '.join(APIS)}, not {self.api!r}")
        if self.preset is not None and self.preset not in PRESETS:
            raise BenchError(f"--preset {self.preset!r} is unknown; there are {', '.join(sorted(PRESETS))}")
        if self.preset is not None and self.trace is not None:
            raise BenchError("--preset and --trace both say which lengths to use: give one of them")
        if self.concurrency is not None and self.rate_per_s is not None:
            raise BenchError("--concurrency is closed-loop and --rate is open-loop: give one of them")
        if self.trace is not None and (self.input_tokens or self.output_tokens):
            raise BenchError("--trace brings its own lengths: leave out --input-tokens and --output-tokens")
        self._check_numbers()
        return self

    def _check_numbers(self) -> None:
        for name, value in (("--requests", self.requests), ("--concurrency", self.concurrency)):
            if value is not None and value < 1:
                raise BenchError(f"{name} must be at least 1, not {value}")
        positive = {
            "--rate": self.rate_per_s,
            "--time-scale": self.time_scale,
            "--slo-ttft-ms": self.slo_ttft_ms,
            "--slo-tpot-ms": self.slo_tpot_ms,
            "--timeout-s": self.timeout_s,
        }
        for name, number in positive.items():
            if number is not None and not (math.isfinite(number) and number > 0):
                raise BenchError(f"{name} must be a number above 0, not {number}")
        if self.vocab_size <= 2_000:
            raise BenchError(f"--vocab-size must be above 2000, not {self.vocab_size}")

    @property
    def resolved_target(self) -> str:
        return self.target or DEFAULT_TARGETS[self.api]
