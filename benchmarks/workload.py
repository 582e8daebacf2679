"""From options to the calls of one run: which token ids, how many tokens back, and when. Reads the trace, else pure."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from benchmarks.arrivals import poisson_arrivals_s
from benchmarks.errors import BenchError
from benchmarks.lengths import parse_lengths, rescaled
from benchmarks.options import DEFAULT_LENGTH, DEFAULT_REQUESTS, DEFAULT_USERS, BenchOptions
from benchmarks.presets import PRESETS
from benchmarks.prompts import PromptMaker
from benchmarks.trace import TraceRow, check_rising, read_trace

WARM_UP_INPUT_TOKENS = 16
WARM_UP_OUTPUT_TOKENS = 4


@dataclass(frozen=True)
class Call:
    """One request to make. `at_s` is its arrival from the start of the run; in a closed loop it is not used (0.0)."""

    index: int
    at_s: float
    prompt_token_ids: array[int]
    output_tokens: int

    @property
    def input_tokens(self) -> int:
        return len(self.prompt_token_ids)


@dataclass(frozen=True)
class Workload:
    """`users` is the number of closed-loop users, None for an open loop. `left_out`: rows that exceed the context."""

    calls: tuple[Call, ...]
    warm_up: Call
    users: int | None
    left_out: int = 0


def build_workload(options: BenchOptions) -> Workload:
    """Raises BenchError for an unknown distribution, an unreadable trace, or nothing left to send."""
    rows, left_out = _rows_of_trace(options) if options.trace else (_rows_drawn(options), 0)
    users = _users(options)
    if options.rate_per_s is not None:
        arrivals_s = poisson_arrivals_s(options.rate_per_s, len(rows), Random(f"{options.seed} arrivals"))
    elif users is None:
        arrivals_s = tuple((row.arrival_s - rows[0].arrival_s) * options.time_scale for row in rows)
    else:
        arrivals_s = (0.0,) * len(rows)
    maker = PromptMaker(options.seed, options.vocab_size)
    calls = tuple(
        Call(i, at_s, maker.prompt(i, row.input_tokens, row.hash_ids), row.output_tokens)
        for i, (row, at_s) in enumerate(zip(rows, arrivals_s, strict=True))
    )
    warm_up = Call(-1, 0.0, maker.prompt(-1, WARM_UP_INPUT_TOKENS), WARM_UP_OUTPUT_TOKENS)
    return Workload(calls, warm_up, users, left_out)


def _users(options: BenchOptions) -> int | None:
    if options.concurrency is not None:
        return options.concurrency
    if options.rate_per_s is not None or options.trace is not None:
        return None
    return PRESETS[options.preset].concurrency if options.preset else DEFAULT_USERS


def _rows_of_trace(options: BenchOptions) -> tuple[tuple[TraceRow, ...], int]:
    rows = read_trace(str(options.trace), options.requests)
    if _users(options) is None and options.rate_per_s is None:
        check_rising(rows, str(options.trace))
    limit = options.max_context_tokens
    kept = tuple(row for row in rows if limit is None or row.input_tokens + row.output_tokens <= limit)
    if not kept:
        raise BenchError(f"no row of {options.trace} fits --max-context {limit}")
    return kept, len(rows) - len(kept)


def _rows_drawn(options: BenchOptions) -> tuple[TraceRow, ...]:
    preset = PRESETS[options.preset] if options.preset else None
    count = options.requests or (preset.requests if preset else DEFAULT_REQUESTS)
    inputs_from = options.input_tokens or (preset.input_tokens if preset else DEFAULT_LENGTH)
    outputs_from = options.output_tokens or (preset.output_tokens if preset else DEFAULT_LENGTH)
    inputs = _drawn(inputs_from, count, options.seed, "in")
    outputs = _drawn(outputs_from, count, options.seed, "out")
    if preset and count == preset.requests:  # the totals are those of the preset as it stands
        inputs = _to_total(inputs, None if options.input_tokens else preset.total_input_tokens)
        outputs = _to_total(outputs, None if options.output_tokens else preset.total_output_tokens)
    return tuple(TraceRow(0.0, tokens_in, tokens_out) for tokens_in, tokens_out in zip(inputs, outputs, strict=True))


def _drawn(distribution: str, count: int, seed: int, name: str) -> Sequence[int]:
    lengths, rng = parse_lengths(distribution), Random(f"{seed} lengths {name}")
    return [lengths.draw(rng) for _ in range(count)]


def _to_total(lengths: Sequence[int], total: int | None) -> Sequence[int]:
    return lengths if total is None else rescaled(lengths, total)
