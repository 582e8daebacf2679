"""Progress of fetching and converting a model, as a bar."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cluster.progress import Progress

if TYPE_CHECKING:
    from rich.console import Console


@contextmanager
def model_progress(console: Console) -> Iterator[Progress]:
    """A `Progress` that draws on `console`; where that is no terminal, one line per stage."""
    if not console.is_terminal:
        told: set[str] = set()

        def tell(stage: str, done_bytes: int, total_bytes: int) -> None:
            if stage not in told:
                told.add(stage)
                console.print(f"  {stage} …")

        yield tell
        return

    from rich.progress import BarColumn, DownloadColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Bars(*columns, console=console, transient=True) as bars:
        tasks: dict[str, int] = {}

        def draw(stage: str, done_bytes: int, total_bytes: int) -> None:
            if stage not in tasks:
                for earlier in tasks.values():
                    bars.remove_task(earlier)  # type: ignore[arg-type]
                tasks.clear()
                tasks[stage] = bars.add_task(stage, total=total_bytes or None)
            bars.update(tasks[stage], completed=done_bytes, total=total_bytes or None)  # type: ignore[arg-type]

        yield draw
