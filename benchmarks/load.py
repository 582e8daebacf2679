"""Runs one benchmark: `run(options) -> BenchReport`, and the command line around it."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime

from rich.console import Console

from benchmarks.drive import Drive
from benchmarks.errors import BenchError, CallFailed
from benchmarks.host import host_facts
from benchmarks.lengths import GRAMMAR
from benchmarks.options import APIS, DEFAULT_LENGTH, DEFAULT_REQUESTS, DEFAULT_TARGETS, DEFAULT_USERS, BenchOptions
from benchmarks.presets import PRESETS
from benchmarks.report import BenchReport, build_report
from benchmarks.table import print_report, progress_bar
from benchmarks.transports import Transport, make_transport
from benchmarks.workload import Call, Workload, build_workload

WARM_UP_TIMEOUT_S = 60.0


def run(options: BenchOptions, console: Console | None = None) -> BenchReport:
    """Warms up, sends the load, returns the figures; prints and saves nothing (`print_report`, `BenchReport.save`).

    Draws a progress bar on `console` (stderr by default) when that is a terminal. Raises BenchError with one line when
    the options cannot be, nobody answers, or the warm-up call fails; calls of the load that fail are in the report.
    """
    workload = build_workload(options.validated())
    return asyncio.run(_run(options, workload, console or Console(stderr=True)))


async def _run(options: BenchOptions, workload: Workload, console: Console) -> BenchReport:
    transport = make_transport(options)
    try:
        model = await transport.open(options.model)
        await _warm_up(transport, workload.warm_up, options)
        host, started_at = host_facts(), datetime.now(UTC)
        with progress_bar(console, len(workload.calls)) as bar:
            records = await Drive(transport, bar, options.timeout_s).run(workload)
    finally:
        await transport.close()
    return build_report(
        options,
        records,
        model=model,
        host=host,
        started_at=started_at,
        users=workload.users,
        left_out=workload.left_out,
    )


async def _warm_up(transport: Transport, call: Call, options: BenchOptions) -> None:
    """One short call that no figure sees: connections, lazy imports and first pages are paid here."""
    try:
        async with asyncio.timeout(min(WARM_UP_TIMEOUT_S, options.timeout_s)):
            async for _ in transport.stream(call):
                pass
    except CallFailed as failure:
        raise BenchError(f"the warm-up call to {options.resolved_target} failed, {failure}") from None
    except TimeoutError:
        raise BenchError(f"the warm-up call to {options.resolved_target} got no answer in time") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns 0 when every call got its full answer, 1 when some did not, 2 when nothing ran."""
    options, as_json = parse_arguments(arguments)
    try:
        report = run(options)
        saved = report.save(options.save_dir) if options.save_dir else None
    except (BenchError, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bench: interrupted", file=sys.stderr)
        return 130
    if as_json:
        print(json.dumps({**report.figures_json(), "saved": str(saved) if saved else None}))
    else:
        console = Console()
        print_report(report, console)
        if saved:
            console.print(f"saved {saved}", highlight=False, soft_wrap=True)
    return 0 if report.ok else 1


def parse_arguments(arguments: Sequence[str] | None = None) -> tuple[BenchOptions, bool]:
    """Reads the command line: every flag is a field of BenchOptions, but for `--json` (print the figures as JSON)."""
    parser = argparse.ArgumentParser(
        prog="headrace bench",
        description="Loads a running cluster and prints TTFT, ITL, TPOT, E2E, tokens/s and goodput.",
        epilog=f"Lengths are {GRAMMAR}. Presets: " + "; ".join(f"{n}: {p.about}" for n, p in PRESETS.items()) + ".",
    )
    _add_target_arguments(parser)
    _add_load_arguments(parser)
    _add_result_arguments(parser)
    known = vars(parser.parse_args(arguments))
    as_json = bool(known.pop("json"))
    return BenchOptions(**known), as_json


def _add_target_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("whom to ask")
    where.add_argument("--api", choices=APIS, default="grpc")
    where.add_argument("--target", default="", help="; ".join(f"{k}: {v}" for k, v in DEFAULT_TARGETS.items()))
    where.add_argument("--model", default="", help="default: the first that the server lists")


def _add_load_arguments(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("the load")
    load.add_argument("--preset", metavar="NAME", help=", ".join(PRESETS))
    load.add_argument(
        "--requests", type=int, metavar="N", help=f"how many (default {DEFAULT_REQUESTS}, or all of a trace)"
    )
    load.add_argument(
        "--concurrency", type=int, metavar="N", help=f"closed loop with so many users (default {DEFAULT_USERS})"
    )
    load.add_argument("--rate", type=float, dest="rate_per_s", metavar="PER_S", help="open loop, Poisson arrivals")
    load.add_argument("--trace", metavar="FILE", help="JSON lines of arrival_s, input_tokens, output_tokens")
    load.add_argument("--time-scale", type=float, default=1.0, metavar="X", help="factor on the trace's arrival times")
    load.add_argument("--input-tokens", metavar="LENGTHS", help=f"of the prompts (default {DEFAULT_LENGTH})")
    load.add_argument("--output-tokens", metavar="LENGTHS", help=f"of the answers (default {DEFAULT_LENGTH})")
    load.add_argument(
        "--max-context", type=int, dest="max_context_tokens", metavar="TOKENS", help="leave longer rows of a trace out"
    )
    load.add_argument("--vocab-size", type=int, default=32_000, metavar="N", help="prompt ids are below it (32000)")
    load.add_argument("--seed", type=int, default=0, metavar="N", help="of lengths, arrivals and token ids")


def _add_result_arguments(parser: argparse.ArgumentParser) -> None:
    result = parser.add_argument_group("the result")
    result.add_argument("--slo-ttft-ms", type=float, metavar="MS", help="goodput counts calls within it")
    result.add_argument("--slo-tpot-ms", type=float, metavar="MS", help="goodput counts calls within it")
    result.add_argument("--timeout-s", type=float, default=600.0, metavar="S", help="for the whole run (600)")
    result.add_argument("--save-dir", default="bench-results", metavar="DIR", help="for the JSON; '' saves none")
    result.add_argument("--label", default="", metavar="WORD", help="names this variant in comparisons")
    result.add_argument("--json", action="store_true", help="print the figures as one line of JSON")


if __name__ == "__main__":
    sys.exit(main())
