"""The `headrace` command. What is heavy (Ray, the model's tools, gRPC) is imported by the command that needs it."""

from __future__ import annotations

import sys
from typing import Annotated

try:
    import typer
except ModuleNotFoundError:  # the plain package is the client only
    sys.exit("headrace: this command needs the server's packages: install headrace[cpu] or headrace[gpu]")

from cluster.cli import bench, chat, down, generate, lab, model, status, up
from cluster.cli.output import report_failure

_HELP = """
Serve a large language model on this machine's GPUs or CPU.

[bold]A first look[/bold]

  headrace up --detach          start the embedded model; returns when it answers

  headrace chat                 talk to it

  headrace status               its workers, free KV cache, running and waiting requests

  headrace down                 end all that was started, and nothing else

Every option of `up` but --detach and --json can also be given as a variable: --kv-blocks as HEADRACE_KV_BLOCKS.
Models are kept in $HEADRACE_CACHE (~/.cache/headrace), clusters' logs in $HEADRACE_STATE (~/.local/state/headrace).
"""

app = typer.Typer(
    name="headrace",
    help=_HELP,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"headrace {version('headrace')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Options of `headrace` itself."""


app.command("up", help=up.HELP)(up.up)
app.command("down", help=down.HELP)(down.down)
app.command("status", help=status.HELP)(status.status)
app.command("chat", help=chat.HELP)(chat.chat)
app.command("generate", help=generate.HELP)(generate.generate)
app.command("bench", help=bench.HELP, add_help_option=False, context_settings=bench.PASS_EVERYTHING_ON)(bench.bench)
app.add_typer(model.app, name="model")
app.add_typer(lab.app, name="lab")


def main() -> None:
    """The console script. Exit status 1: a failure of the cluster, 2: a mistake of the operator, 130: Ctrl-C."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(1)
    except Exception as error:
        sys.exit(report_failure(error))
