"""`headrace bench`: hands its arguments to the load generator."""

from __future__ import annotations

import typer

HELP = (
    "Load the running cluster and print TTFT, ITL, throughput and goodput; `headrace bench --help` lists its options."
)
PASS_EVERYTHING_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def bench(context: typer.Context) -> None:
    from benchmarks.load import main

    raise typer.Exit(main(context.args))
