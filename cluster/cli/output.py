"""What all commands share: two consoles, one-line failures, JSON."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.errors import OperatorError
from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from rich.console import Console

FAILED, OPERATOR_ERROR = 1, 2

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on standard output, nothing else.")]
NameOption = Annotated[str, typer.Option("--name", help="The cluster's name, as given to `headrace up`.")]


def out() -> Console:
    """Standard output, for results."""
    from rich.console import Console

    return Console(highlight=False)


def err() -> Console:
    """Standard error, for progress and failures."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def print_json(value: dict[str, Any]) -> None:
    """One line, so that a script can take the last line of the output."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


def report_failure(error: Exception) -> int:
    """Prints one line for an error that was foreseen and returns the exit status; raises any other, which is a bug."""
    if isinstance(error, OperatorError):
        status = OPERATOR_ERROR
    elif isinstance(error, HeadraceError):
        status = OPERATOR_ERROR if error.field else FAILED
    else:
        raise error
    message = " ".join(str(error).split())
    print(f"headrace: {message}", file=sys.stderr, flush=True)
    return status
