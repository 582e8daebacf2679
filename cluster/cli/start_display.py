"""Shows a start as it happens: one line per stage, with its time."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.errors import StartFailed
from cluster.reporting import Event

if TYPE_CHECKING:
    from rich.console import Console


class StartDisplay:
    """Prints stages on a console; on a terminal the running one has a spinner."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def follow(self, events: Iterable[Event], log: Path) -> dict[str, Any]:
        """Returns the cluster's state once it is ready. Raises `StartFailed` with the supervisor's one line."""
        spinner = self._console.status("starting") if self._console.is_terminal else None
        with spinner or nullcontext():
            for event in events:
                match event.kind:
                    case "begin":
                        if spinner is not None:
                            spinner.update(event.text)
                    case "done":
                        self._console.print(f"  [green]✓[/green] {event.text:<12} {event.seconds:6.2f} s")
                    case "warning":
                        self._console.print(f"  [yellow]! {event.text}[/yellow]")
                    case "failed":
                        raise StartFailed(event.text)
                    case "ready":
                        self._console.print(f"  [green]✓[/green] {'ready':<12} {event.seconds:6.2f} s")
                        return event.detail
        raise StartFailed(f"the supervisor ended without a word: {_last_line(log)}")


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return f"there is no log at {log}"
    return next((line.strip() for line in reversed(lines) if line.strip()), f"its log {log} is empty")
