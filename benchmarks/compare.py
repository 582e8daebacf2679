"""Compares saved runs: medians over the runs of each label, and their ratio to the first label.

    python -m benchmarks.compare bench-results/*.json

Runs of the same label are repeats of one variant. Take them in turns (A B A B …): a machine that slows down between
two blocks of runs would otherwise look like a difference between the variants.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.errors import BenchError
from benchmarks.report import FORMAT

Run = Mapping[str, Any]

VARIANT_OPTIONS = frozenset({"api", "target", "model", "label", "save_dir", "timeout_s"})
"""Options in which two variants may differ; all others are the workload."""


def _millis(name: str, figure: str) -> Callable[[Run], float | None]:
    return lambda run: run[name][figure] * 1e3 if run[name] else None


FIGURES: dict[str, Callable[[Run], float | None]] = {
    "output tokens/s": lambda run: run["output_tokens_per_s"],
    "input tokens/s": lambda run: run["input_tokens_per_s"],
    "requests/s": lambda run: run["requests_per_s"],
    "goodput/s": lambda run: run["goodput_per_s"],
    "TTFT p50 ms": _millis("ttft", "p50"),
    "TTFT p99 ms": _millis("ttft", "p99"),
    "ITL p99 ms": _millis("itl", "p99"),
    "TPOT p50 ms": _millis("tpot", "p50"),
    "E2E p50 ms": _millis("e2e", "p50"),
}


def read_run(path: str | Path) -> Run:
    """One saved report. Raises BenchError naming the file when it is not one of this format."""
    try:
        run = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BenchError(f"cannot read {path}: {error}") from None
    if not isinstance(run, dict) or run.get("format") != FORMAT:
        raise BenchError(f"{path} is no saved run of format {FORMAT}")
    return run


def by_label(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Groups in order of first appearance. Raises BenchError unless all had the same workload and no errors."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        label = run["options"]["label"] or "(no label)"
        if run["errors"]:
            raise BenchError(f"a run of {label} has errors ({run['errors']}): it did less work than the others")
        if _workload(run) != _workload(runs[0]):
            raise BenchError(f"a run of {label} had another workload than the first run")
        groups.setdefault(label, []).append(run)
    return groups


def _workload(run: Run) -> dict[str, Any]:
    return {name: value for name, value in run["options"].items() if name not in VARIANT_OPTIONS}


def medians(runs: Sequence[Run]) -> dict[str, float | None]:
    """Per figure the median over the runs; None where a run lacks it."""
    found: dict[str, float | None] = {}
    for name, figure in FIGURES.items():
        values = [value for run in runs if (value := figure(run)) is not None]
        found[name] = median(values) if len(values) == len(runs) else None
    return found


def comparison(groups: Mapping[str, Sequence[Run]]) -> Table:
    """A row per figure: each label's median, and for all but the first its ratio to the first."""
    table = Table(title="medians, and ratios to the first", title_justify="left")
    table.add_column("")
    for label, runs in groups.items():
        table.add_column(f"{label} (n={len(runs)})", justify="right")
    columns = [medians(runs) for runs in groups.values()]
    for name in FIGURES:
        first, *others = (column[name] for column in columns)
        table.add_row(name, _shown(first), *(f"{_shown(value)}{_ratio(value, first)}" for value in others))
    return table


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"


def _ratio(value: float | None, first: float | None) -> str:
    return f" ({value / first:.2f}x)" if value is not None and first else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: 0, or 2 with one line when the runs cannot be compared."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare", description="Medians and ratios of saved runs."
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="saved by `headrace bench --label WORD`")
    try:
        runs = [read_run(path) for path in parser.parse_args(arguments).files]
        Console().print(comparison(by_label(runs)))
    except BenchError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
