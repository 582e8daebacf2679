"""Reading a trace: what is there, and which line is at fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.errors import BenchError
from benchmarks.trace import TraceRow, read_trace

GOOD = '{"arrival_s":0.5,"input_tokens":3,"output_tokens":4}'


def test_reads_rows_and_skips_fields_it_does_not_know(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    row = '{"input_tokens":600,"output_tokens":1,"hash_ids":[0,7],"client":61,"arrival_s":2}'
    path.write_text(f"{GOOD}\n{row}", encoding="utf-8")
    assert read_trace(path) == (TraceRow(0.5, 3, 4), TraceRow(2.0, 600, 1, (0, 7)))
    assert read_trace(path, first=1) == (TraceRow(0.5, 3, 4),)


def test_the_first_rows_are_read_whatever_follows(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(f"{GOOD}\nnot a row\n", encoding="utf-8")
    assert len(read_trace(path, first=1)) == 1


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[1]", "not an object"),
        ('{"arrival_s":0,"output_tokens":4}', "input_tokens must be"),
        ('{"arrival_s":0,"input_tokens":0,"output_tokens":4}', "input_tokens must be"),
        ('{"arrival_s":0,"input_tokens":true,"output_tokens":4}', "input_tokens must be"),
        ('{"arrival_s":0,"input_tokens":4,"output_tokens":2.5}', "output_tokens must be"),
        ('{"arrival_s":-1,"input_tokens":4,"output_tokens":4}', "arrival_s must be"),
        ('{"arrival_s":NaN,"input_tokens":4,"output_tokens":4}', "arrival_s must be"),
        ('{"arrival_s":"now","input_tokens":4,"output_tokens":4}', "arrival_s must be"),
        ('{"arrival_s":0,"input_tokens":4,"output_tokens":4,"hash_ids":["a"]}', "hash_ids must be"),
        ('{"arrival_s":0,"input_tokens":4,"output_tokens":4,"hash_ids":7}', "hash_ids must be"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(f"{GOOD}\n{line}\n{GOOD}\n", encoding="utf-8")
    with pytest.raises(BenchError, match=rf"t\.jsonl line 2: {says}"):
        read_trace(path)


def test_a_trace_that_is_not_there_or_empty_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"cannot read the trace .*No such file"):
        read_trace(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(BenchError, match="has no rows"):
        read_trace(tmp_path / "empty.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b'{"arrival_s": "\xe9"}\n')
    with pytest.raises(BenchError, match="not UTF-8"):
        read_trace(tmp_path / "latin.jsonl")
