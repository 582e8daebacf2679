"""The figures of a report, computed by hand from records, and what is saved of them."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.compare import by_label, comparison, medians, read_run
from benchmarks.errors import BenchError
from benchmarks.options import BenchOptions
from benchmarks.record import CallRecord
from benchmarks.report import BenchReport, build_report
from benchmarks.table import print_report

STARTED = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def record(index: int, scheduled_s: float, token_s: tuple[float, ...], **changes: object) -> CallRecord:
    fields: dict[str, object] = {
        "index": index,
        "scheduled_s": scheduled_s,
        "sent_s": scheduled_s + 0.25,
        "token_s": token_s,
        "deltas": len(token_s),
        "end_s": token_s[-1] if token_s else scheduled_s + 1,
        "input_tokens": 10,
        "expected_tokens": len(token_s),
    }
    return CallRecord(**{**fields, **changes})  # type: ignore[arg-type]


def report(records: list[CallRecord], options: BenchOptions | None = None) -> BenchReport:
    return build_report(
        options or BenchOptions(), records, model="m", host={"cores": 2}, started_at=STARTED, users=None, left_out=0
    )


TWO = [record(0, 1.0, (2.0, 2.5, 4.0)), record(1, 2.0, (5.0,), end_s=6.0)]


def test_every_figure_counts_from_the_scheduled_arrival() -> None:
    found = report(TWO)
    assert found.ttft is not None
    assert found.itl is not None
    assert found.tpot is not None
    assert found.e2e is not None
    assert (found.ttft.p50, found.ttft.max, found.ttft.count) == (2.0, 3.0, 2)
    assert (found.itl.count, found.itl.mean, found.itl.max) == (2, 1.0, 1.5)
    assert (found.tpot.count, found.tpot.p50) == (1, 1.0)  # one token alone has no time per further token
    assert (found.e2e.mean, found.e2e.max) == (3.5, 4.0)
    assert found.send_lag is not None
    assert found.send_lag.p50 == 0.25


def test_rates_are_over_the_time_from_first_arrival_to_last_end() -> None:
    found = report(TWO)
    assert found.duration_s == 5.0
    assert found.output_tokens_per_s == 4 / 5
    assert found.input_tokens_per_s == 20 / 5
    assert found.requests_per_s == 2 / 5
    assert found.goodput_per_s is None
    assert found.ok


@pytest.mark.parametrize(
    ("ttft_ms", "tpot_ms", "met"),
    [
        (1_000.0, None, 1),
        (999.0, None, 0),
        (3_000.0, None, 2),
        (None, 1_000.0, 2),
        (None, 999.0, 1),
        (1_000.0, 999.0, 0),
    ],
)
def test_goodput_counts_the_calls_within_every_target(ttft_ms: float | None, tpot_ms: float | None, met: int) -> None:
    found = report(TWO, BenchOptions(slo_ttft_ms=ttft_ms, slo_tpot_ms=tpot_ms))
    assert found.met_slo == met
    assert found.goodput_per_s == met / 5


def test_failed_calls_are_counted_by_kind_and_touch_no_latency() -> None:
    failed = [
        record(2, 0.0, (0.1,), error="grpc_unavailable", detail="gone"),
        record(3, 0.0, (), error="timeout", sent_s=None),
        record(4, 0.0, (), error="timeout"),
    ]
    options = BenchOptions(slo_ttft_ms=1e6)
    found, without = report([*failed, *TWO], options), report(TWO, options)
    assert found.errors == (("timeout", 2), ("grpc_unavailable", 1))
    assert not found.ok
    assert (found.ttft, found.output_tokens, found.met_slo) == (without.ttft, without.output_tokens, 2)
    assert [r.index for r in found.records] == [0, 1, 2, 3, 4]


def test_nothing_answered_is_not_zero_milliseconds() -> None:
    found = report([record(0, 0.0, (), error="timeout")])
    assert (found.ttft, found.itl, found.tpot, found.e2e, found.tokens_per_delta) == (None,) * 5
    assert found.output_tokens_per_s == 0.0


def test_saves_all_it_measured_and_never_over_an_earlier_run(tmp_path: Path) -> None:
    found = report(TWO, BenchOptions(label="a b/c", seed=9))
    first, second = found.save(tmp_path / "results"), found.save(tmp_path / "results")
    assert (first.name, second.name) == ("20260102T030405-a_b_c.json", "20260102T030405-a_b_c.2.json")
    saved = json.loads(first.read_text(encoding="utf-8"))
    assert saved["options"]["seed"] == 9
    assert saved["host"] == {"cores": 2}
    assert saved["ttft"]["max"] == 3.0
    assert saved["output_tokens_per_s"] == 0.8
    assert [r["token_s"] for r in saved["records"]] == [[2.0, 2.5, 4.0], [5.0]]


def printed(found: BenchReport) -> str:
    console = Console(file=io.StringIO(), width=160)
    print_report(found, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_table_shows_milliseconds_and_the_trouble() -> None:
    options = BenchOptions(slo_ttft_ms=1_000.0)
    text = printed(report([*TWO, record(2, 0.0, (), error="http_429", detail="[busy] come back")], options))
    assert "TTFT" in text
    assert "3,000.0" in text
    assert "requests/s within TTFT <= 1000 ms" in text
    assert "1 x http_429" in text
    assert "[busy] come back" in text
    assert "the generator itself was late (p99 250 ms)" in text
    assert "tokens per delta" not in text
    assert "2.00 tokens per delta" in printed(report([record(0, 0.0, (1.0, 1.0), deltas=1)]))


def saved_runs(folder: Path, label: str, *last_token_s: float) -> list[Path]:
    options = BenchOptions(label=label)
    return [report([record(0, 0.0, (1.0, end))], options).save(folder) for end in last_token_s]


def test_compares_medians_of_labels(tmp_path: Path) -> None:
    paths = [*saved_runs(tmp_path, "old", 2.0, 4.0, 40.0), *saved_runs(tmp_path, "new", 1.0, 2.0)]
    groups = by_label([read_run(path) for path in paths])
    assert [(label, len(runs)) for label, runs in groups.items()] == [("old", 3), ("new", 2)]
    assert medians(groups["old"])["E2E p50 ms"] == 4_000.0
    assert medians(groups["new"])["E2E p50 ms"] == 1_500.0
    assert medians(groups["old"])["goodput/s"] is None
    console = Console(file=io.StringIO(), width=160)
    console.print(comparison(groups))
    assert "1,500.00 (0.38x)" in console.file.getvalue()  # type: ignore[attr-defined]


def test_refuses_to_compare_different_work(tmp_path: Path) -> None:
    good = read_run(saved_runs(tmp_path, "old", 2.0)[0])
    other = read_run(report(TWO, BenchOptions(label="new", seed=1)).save(tmp_path))
    failed = read_run(report([record(0, 0.0, (), error="timeout")], BenchOptions(label="bad")).save(tmp_path))
    with pytest.raises(BenchError, match="another workload"):
        by_label([good, other])
    with pytest.raises(BenchError, match="has errors"):
        by_label([good, failed])
    (tmp_path / "other.json").write_text("{}", encoding="utf-8")
    with pytest.raises(BenchError, match="no saved run"):
        read_run(tmp_path / "other.json")
