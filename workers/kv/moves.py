"""Whole blocks of KV that go from one place to another before a forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class MoveKind(Enum):
    COPY = "copy"
    """Block to block."""
    OUT = "out"
    """Block to host slot."""
    BACK = "back"
    """Host slot to block."""


@dataclass(frozen=True)
class Move:
    """The KV of a whole block, all layers. Moves are carried out in their order: a source is read before a later move,
    or the pass itself, writes there.
    """

    kind: MoveKind
    source: int
    target: int
