"""From a replay to its figures, and medians of them over rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from statistics import median
from typing import Any

from benchmarks.lab.replay import Replay
from benchmarks.percentiles import percentile

TIMED = (
    "duration_s",
    "cpu_s",
    "output_tokens_per_s",
    "ttft_p50_s",
    "ttft_p95_s",
    "ttft_p99_s",
    "itl_p50_s",
    "itl_p95_s",
    "itl_p99_s",
    "itl_max_s",
)
"""Figures that a clock enters; the others are counts and shares of counts."""


@dataclass(frozen=True)
class PolicyFigures:
    """Of one policy on one workload. Shares are from 0 to 1."""

    policy: str
    passes: float
    lone_share: float
    """Share of the passes that advanced a single sequence."""
    rows: float
    """Tokens computed for requests: prompt, and output read back."""
    padding: float
    """Tokens computed only to pad."""
    padding_factor: float
    """(rows + padding) / rows: how many times the necessary tokens were computed."""
    slot_steps: float
    wasted: float
    """Slot-steps that advanced nobody."""
    wasted_share: float
    utilisation: float
    """Share of the computed rows that were anybody's: 1 / `padding_factor`."""
    duration_s: float
    cpu_s: float
    """CPU time of all threads."""
    output_tokens_per_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    itl_p50_s: float | None
    """None where no request has a second token."""
    itl_p95_s: float | None
    itl_p99_s: float | None
    itl_max_s: float | None


def figures_of(replay: Replay) -> PolicyFigures:
    """Counts are the engine's own totals. TTFT counts from the scheduled arrival; ITL is every gap between two tokens
    of a request.
    """
    load = replay.load
    ttft = sorted(record.ttft_s for record in replay.records if record.ttft_s is not None)
    gaps = sorted(gap for record in replay.records for gap in record.itl_s)
    itl = [percentile(gaps, p) if gaps else None for p in (50, 95, 99, 100)]
    computed = load.rows_total + load.padding_rows_total
    return PolicyFigures(
        policy=replay.policy,
        passes=len(replay.advanced),
        lone_share=sum(count == 1 for count in replay.advanced) / len(replay.advanced),
        rows=load.rows_total,
        padding=load.padding_rows_total,
        padding_factor=computed / load.rows_total,
        slot_steps=load.slot_steps_total,
        wasted=load.slot_steps_wasted_total,
        wasted_share=load.slot_steps_wasted_total / load.slot_steps_total,
        utilisation=load.rows_total / computed,
        duration_s=replay.duration_s,
        cpu_s=replay.cpu_s,
        output_tokens_per_s=replay.workload.output_tokens / replay.duration_s,
        ttft_p50_s=percentile(ttft, 50),
        ttft_p95_s=percentile(ttft, 95),
        ttft_p99_s=percentile(ttft, 99),
        itl_p50_s=itl[0],
        itl_p95_s=itl[1],
        itl_p99_s=itl[2],
        itl_max_s=itl[3],
    )


def medians(rounds: Sequence[PolicyFigures]) -> PolicyFigures:
    """Figure by figure, over rounds of one policy on one workload."""
    values: dict[str, Any] = {}
    for name in (field.name for field in fields(PolicyFigures) if field.name != "policy"):
        known = [value for each in rounds if (value := getattr(each, name)) is not None]
        values[name] = median(known) if known else None
    return PolicyFigures(policy=rounds[0].policy, **values)


def as_json(figures: PolicyFigures, *, timed: bool) -> dict[str, object]:
    """`timed` False leaves out what a clock enters."""
    return {name: value for name, value in asdict(figures).items() if timed or name not in TIMED}
