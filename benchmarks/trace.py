"""Recorded load: JSON lines with `arrival_s`, `input_tokens`, `output_tokens` and, where known, `hash_ids`."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path

from benchmarks.errors import BenchError


@dataclass(frozen=True)
class TraceRow:
    """`hash_ids`: prefix-chained blocks of 512 prompt tokens; an equal id is the same block after the same prefix."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


def read_trace(path: str | Path, first: int | None = None) -> tuple[TraceRow, ...]:
    """The first so many rows (all when None) in file order. Raises BenchError naming the file and the line at fault."""
    try:
        with Path(path).open(encoding="utf-8") as lines:
            rows = tuple(_row(line, f"{path} line {number}") for number, line in islice(enumerate(lines, 1), first))
    except OSError as error:
        raise BenchError(f"cannot read the trace {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BenchError(f"the trace {path} is not UTF-8") from None
    if not rows:
        raise BenchError(f"the trace {path} has no rows")
    return rows


def check_rising(rows: tuple[TraceRow, ...], path: str) -> None:
    """Raises BenchError when arrivals go backwards: such a trace has a clock per session and is not one open loop."""
    for number, (earlier, later) in enumerate(pairwise(rows), 2):
        if later.arrival_s < earlier.arrival_s:
            raise BenchError(
                f"{path} line {number}: arrival_s goes backwards; use its lengths with --concurrency or --rate"
            )


def _row(line: str, where: str) -> TraceRow:
    try:
        fields = json.loads(line)
    except ValueError:
        raise BenchError(f"{where}: not JSON") from None
    if not isinstance(fields, dict):
        raise BenchError(f"{where}: not an object")
    arrival_s = fields.get("arrival_s", 0.0)
    if not _is_number(arrival_s) or not math.isfinite(arrival_s) or arrival_s < 0:
        raise BenchError(f"{where}: arrival_s must be a number of seconds from 0 up")
    hash_ids = fields.get("hash_ids") or ()
    if not isinstance(hash_ids, list | tuple) or not all(_is_whole(i) for i in hash_ids):
        raise BenchError(f"{where}: hash_ids must be a list of whole numbers")
    counts = [_count(fields, name, where) for name in ("input_tokens", "output_tokens")]
    return TraceRow(float(arrival_s), counts[0], counts[1], tuple(hash_ids))


def _count(fields: dict[str, object], name: str, where: str) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BenchError(f"{where}: {name} must be a whole number from 1 up")
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
