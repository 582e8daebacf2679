"""What a policy wastes is on the metrics page, one row per worker, as totals that Prometheus can rate."""

from __future__ import annotations

from typing import Any

from headrace.frame import LoadReport
from headrace.store.interface import BoardRow
from router.metrics import RouterMetrics


def row(worker: str, **totals: Any) -> BoardRow:
    load = LoadReport(
        seq=1, credit_blocks=1, free_slots=1, free_blocks=1, cached_blocks=0, held_blocks=0, total_blocks=1,
        block_size=16, max_context=64, running=0, waiting=0, uncomputed_tokens=0, step_s=0.0, drain_tokens_per_s=0.0,
        iterations=7, prompt_tokens_total=0, output_tokens_total=0, preemptions_total=0, draining=False, model="m",
        weight_version="w", numerics="n", **totals,
    )  # fmt: skip
    return BoardRow(worker, load, "0-0", 1, 1_000)


def test_slot_steps_rows_and_padding_are_shown_per_worker() -> None:
    rows = (
        row("a", slot_steps_total=64_000, slot_steps_wasted_total=61_380, rows_total=2_640, padding_rows_total=61_500),
        row("b"),
    )
    page = RouterMetrics("m").exposition(rows, None, 0).decode()
    shown = {line for line in page.splitlines() if line.startswith("headrace:") and 'worker="a"' in line}
    assert shown >= {
        'headrace:slot_steps_total{model_name="m",worker="a"} 64000.0',
        'headrace:slot_steps_wasted_total{model_name="m",worker="a"} 61380.0',
        'headrace:rows_total{model_name="m",worker="a"} 2640.0',
        'headrace:padding_rows_total{model_name="m",worker="a"} 61500.0',
    }
    assert 'headrace:slot_steps_wasted_total{model_name="m",worker="b"} 0.0' in page


def test_queue_time_is_shown_by_worker_and_reason() -> None:
    rows = (row("a", waited_s_by_reason=(("blocks", 2.5), ("slots", 0.5))), row("b"))
    page = RouterMetrics("m").exposition(rows, None, 0).decode()
    shown = [line for line in page.splitlines() if line.startswith("headrace:waited_seconds_total{")]
    assert shown == [
        'headrace:waited_seconds_total{model_name="m",reason="blocks",worker="a"} 2.5',
        'headrace:waited_seconds_total{model_name="m",reason="slots",worker="a"} 0.5',
    ]
