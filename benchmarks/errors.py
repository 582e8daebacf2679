"""What can go wrong in a benchmark, apart from the calls themselves (those are counted in the report)."""

from __future__ import annotations


class BenchError(Exception):
    """The run cannot start or go on; the message is one line for the person who typed the command."""


class CallFailed(Exception):
    """One call ended without its answer. The report counts by `kind`, which has few values; `detail` is free text."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail
