"""One run for the eye: a table of figures, and a bar while it goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.percentiles import Summary
from benchmarks.record import CallRecord
from benchmarks.report import BenchReport

SHOWN_ERROR_KINDS = 3
"""For how many kinds an example's detail is printed."""


def print_report(report: BenchReport, console: Console) -> None:
    """Latencies in milliseconds, then rates, then whatever was not as it should be."""
    console.print(_latencies(report))
    for line in figure_lines(report):
        console.print(line, highlight=False)
    for line in _warnings(report):
        console.print(f"[yellow]{line}[/yellow]", highlight=False)


def _latencies(report: BenchReport) -> Table:
    load = "open loop" if report.users is None else f"{report.users} users"
    title = f"{report.model} over {report.options.api}, {load}, {report.completed} of {len(report.records)} answered"
    table = Table(title=title, title_justify="left")
    table.add_column("milliseconds")
    for name in ("p50", "p90", "p99", "mean", "max", "samples"):
        table.add_column(name, justify="right")
    rows = (
        ("TTFT", report.ttft),
        ("ITL", report.itl),
        ("TPOT", report.tpot),
        ("E2E", report.e2e),
    )
    for name, figures in rows:
        table.add_row(name, *_cells(figures))
    return table


def _cells(figures: Summary | None) -> list[str]:
    if figures is None:
        return ["-"] * 5 + ["0"]
    times_s = (figures.p50, figures.p90, figures.p99, figures.mean, figures.max)
    return [*(f"{time_s * 1e3:,.1f}" for time_s in times_s), f"{figures.count:,}"]


def figure_lines(report: BenchReport) -> list[str]:
    """Rates as lines of text; kept apart so that logs without a terminal read the same."""
    lines = [
        f"output {report.output_tokens_per_s:,.1f} tokens/s ({report.output_tokens:,} in {report.duration_s:,.2f} s)",
        f"input  {report.input_tokens_per_s:,.1f} tokens/s ({report.input_tokens:,})",
        f"answers {report.requests_per_s:,.2f} requests/s",
    ]
    if report.goodput_per_s is not None:
        wanted = (("TTFT", report.options.slo_ttft_ms), ("TPOT", report.options.slo_tpot_ms))
        targets = " and ".join(f"{name} <= {ms:g} ms" for name, ms in wanted if ms is not None)
        lines.append(f"goodput {report.goodput_per_s:,.2f} requests/s within {targets} ({report.met_slo} calls)")
    return lines


def _warnings(report: BenchReport) -> list[str]:
    lines = [f"{count} x {kind}" for kind, count in report.errors]
    for kind, _ in report.errors[:SHOWN_ERROR_KINDS]:
        example = next(record for record in report.records if record.error == kind)
        lines.append(f"  {kind}, for example call {example.index}: {example.detail}")
    if report.left_out:
        lines.append(f"{report.left_out} rows of the trace exceed --max-context and were left out")
    if report.tokens_per_delta is not None and report.tokens_per_delta > 1.05:
        lines.append(f"{report.tokens_per_delta:.2f} tokens per delta: ITL has zeros, read TPOT")
    if report.send_lag is not None and report.send_lag.p99 > 0.05:
        lines.append(
            f"the generator itself was late (p99 {report.send_lag.p99 * 1e3:.0f} ms): it needs more CPU of its own"
        )
    return [line.replace("[", r"\[") for line in lines]


class ProgressBar:
    """An `Observer` that draws: calls done, tokens so far."""

    def __init__(self, progress: Progress, calls: int) -> None:
        self._progress = progress
        self._task = progress.add_task("calls", total=calls, tokens=0, failed=0)
        self._tokens = 0
        self._failed = 0

    def tokens(self, count: int) -> None:
        self._tokens += count  # drawn by the bar's own thread, a few times a second
        self._progress.tasks[0].fields["tokens"] = self._tokens

    def finished(self, record: CallRecord) -> None:
        self._failed += not record.ok
        self._progress.update(self._task, advance=1, failed=self._failed)


@contextmanager
def progress_bar(console: Console, calls: int) -> Iterator[ProgressBar]:
    """Drawn while the block runs."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]:,} tokens, {task.fields[failed]} failed"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield ProgressBar(progress, calls)
