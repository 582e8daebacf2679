"""The worker's truth after one iteration, as the board shows it."""

from __future__ import annotations

from headrace.frame import LoadReport
from workers.model.interface import ModelShape
from workers.roster import Roster
from workers.scheduler.state import StepPlan
from workers.step_statistics import StepStatistics

NOTHING_SEEN = "0-0"
"""The inbox id before every entry."""


def load_report(
    roster: Roster, statistics: StepStatistics, shape: ModelShape, max_context: int, plan: StepPlan, draining: bool
) -> LoadReport:
    """The report that goes with `plan`'s iteration; `seq` 0, for the sender to number."""
    state, ledger = roster.state, roster.holdings.tables.pool.ledger
    prefilling = (*state.waiting, *(sequence for sequence in state.running if sequence.gap > 1))
    return LoadReport(
        seq=0,
        credit_blocks=0 if draining else state.credit_blocks(),
        free_slots=state.free_slots(),
        free_blocks=ledger.free_blocks,
        cached_blocks=ledger.cached_blocks,
        held_blocks=ledger.held_blocks,
        total_blocks=ledger.total_blocks,
        block_size=state.limits.block_size,
        max_context=max_context,
        running=len(state.running),
        waiting=len(state.waiting),
        uncomputed_tokens=sum(sequence.gap for sequence in prefilling),
        step_s=statistics.step_s,
        drain_tokens_per_s=statistics.drain_tokens_per_s,
        iterations=statistics.iterations,
        prompt_tokens_total=statistics.prompt_tokens_total,
        output_tokens_total=statistics.output_tokens_total,
        preemptions_total=statistics.preemptions_total,
        draining=draining,
        model=shape.name,
        weight_version=shape.weight_version,
        numerics=shape.numerics,
        waiting_by_reason=plan.waiting_by_reason,
        prefix_tokens_total=roster.holdings.known_tokens_total,
        prefix_hit_tokens_total=roster.holdings.hit_tokens_total,
        host_hit_tokens_total=roster.holdings.host_hit_tokens_total,
        slot_steps_total=statistics.batch.slot_steps,
        slot_steps_wasted_total=statistics.batch.slot_steps_wasted,
        rows_total=statistics.batch.rows,
        padding_rows_total=statistics.batch.padding,
        waited_s_by_reason=roster.waits.totals_s(),
    )
