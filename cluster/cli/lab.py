"""`headrace lab`: experiments on the engine itself, in this process, without a cluster."""

from __future__ import annotations

from pathlib import Path

import typer

from cluster.cli.bench import PASS_EVERYTHING_ON
from cluster.cli.output import err
from cluster.cli.progress import model_progress

app = typer.Typer(help="Experiments on the engine, without a cluster.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Experiments on the engine, without a cluster."""


@app.command(
    "policies",
    help="The same load under every batching policy; `headrace lab policies --help` lists its options.",
    add_help_option=False,
    context_settings=PASS_EVERYTHING_ON,
)
def policies(context: typer.Context) -> None:
    from benchmarks.lab.policies import main

    raise typer.Exit(main(context.args, _folder_of))


def _folder_of(model: str) -> Path:
    from cluster.model_cache import resolve_model

    with model_progress(err()) as progress:
        return resolve_model(model, progress=progress).path
