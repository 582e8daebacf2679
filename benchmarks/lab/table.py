"""The lab's figures for the eye: a column per policy, measured ones with their ratio to the first column."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.lab.figures import PolicyFigures
from benchmarks.lab.workloads import LabWorkload

Figure = Callable[[PolicyFigures], float | None]

COUNTS: tuple[tuple[str, Figure, str], ...] = (
    ("passes", lambda f: f.passes, ",.0f"),
    ("passes for one sequence alone", lambda f: f.lone_share, ".1%"),
    ("rows computed", lambda f: f.rows, ",.0f"),
    ("padding rows", lambda f: f.padding, ",.0f"),
    ("padding factor", lambda f: f.padding_factor, ".2f"),
    ("slot-steps", lambda f: f.slot_steps, ",.0f"),
    ("wasted slot-steps", lambda f: f.wasted, ",.0f"),
    ("wasted share", lambda f: f.wasted_share, ".1%"),
    ("utilisation", lambda f: f.utilisation, ".1%"),
)
TIMES: tuple[tuple[str, Figure], ...] = (
    ("CPU seconds", lambda f: f.cpu_s),
    ("output tokens/s", lambda f: f.output_tokens_per_s),
    ("TTFT p50 ms", lambda f: _ms(f.ttft_p50_s)),
    ("TTFT p95 ms", lambda f: _ms(f.ttft_p95_s)),
    ("TTFT p99 ms", lambda f: _ms(f.ttft_p99_s)),
    ("ITL p50 ms", lambda f: _ms(f.itl_p50_s)),
    ("ITL p95 ms", lambda f: _ms(f.itl_p95_s)),
    ("ITL p99 ms", lambda f: _ms(f.itl_p99_s)),
    ("ITL max ms", lambda f: _ms(f.itl_max_s)),
)


def print_counted(console: Console, workload: LabWorkload, columns: Sequence[PolicyFigures]) -> None:
    table = _empty(f"{workload.name}, counted: {workload.about}", columns)
    _add_counts(table, columns)
    console.print(table)
    if workload.name == "padding":
        factors = ", ".join(f"{each.policy} {short_prompt_factor(workload, each):.0f}x" for each in columns)
        console.print(
            f"rows computed in the short prompt's slot, over its tokens: {factors}", highlight=False, soft_wrap=True
        )


def short_prompt_factor(workload: LabWorkload, figures: PolicyFigures) -> float:
    """Of two prompts prefilled together, one token out: all padding lies in the shorter one's slot."""
    short = min(ask.prompt_tokens for ask in workload.asks)
    return (short + figures.padding) / short


def print_measured(console: Console, workload: LabWorkload, columns: Sequence[PolicyFigures], rounds: int) -> None:
    table = _empty(f"{workload.name}, measured, medians of {rounds}: {workload.about}", columns)
    _add_counts(table, columns)
    for name, figure in TIMES:
        first, *others = (figure(each) for each in columns)
        table.add_row(name, _number(first), *(f"{_number(value)}{_ratio(value, first)}" for value in others))
    console.print(table)


def _empty(title: str, columns: Sequence[PolicyFigures]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for figures in columns:
        table.add_column(figures.policy, justify="right")
    return table


def _add_counts(table: Table, columns: Sequence[PolicyFigures]) -> None:
    for name, figure, shape in COUNTS:
        table.add_row(name, *(format(figure(each), shape) for each in columns))


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _ratio(value: float | None, first: float | None) -> str:
    return f" ({value / first:.2f}x)" if value is not None and first else ""
