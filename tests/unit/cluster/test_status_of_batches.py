"""The one line of `headrace status` on what the batching policy wastes."""

from __future__ import annotations

from typing import get_args

from cluster.cli.status import batching_line
from cluster.settings import Settings
from tests.unit.router.test_metrics_of_batches import row
from workers.scheduler.policy import policy_names


def test_all_workers_are_summed_into_one_line() -> None:
    loads = [
        row(
            "a", slot_steps_total=64_000, slot_steps_wasted_total=61_380, rows_total=3_000, padding_rows_total=1_000
        ).load,
        row("b", slot_steps_total=1_000, slot_steps_wasted_total=20, rows_total=1_000, padding_rows_total=0).load,
    ]
    assert batching_line(loads) == (
        "batches: 61,400 of 65,000 slot-steps wasted (94.5%), 1,000 padding rows beside 4,000 (utilisation 80.0%)"
    )


def test_before_the_first_pass_there_is_nothing_to_say() -> None:
    assert batching_line([row("a").load]) == ""
    assert batching_line([]) == ""


def test_the_setting_offers_exactly_the_policies_there_are() -> None:
    offered = get_args(Settings.model_fields["policy"].annotation)
    assert sorted(offered) == sorted(policy_names())
