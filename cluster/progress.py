"""How long work in the cache tells how far it is."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called as work advances. `total_bytes` 0 means the amount is not known."""

    def __call__(self, stage: str, done_bytes: int, total_bytes: int) -> None: ...


def silent(stage: str, done_bytes: int, total_bytes: int) -> None:
    """A `Progress` that shows nothing."""
