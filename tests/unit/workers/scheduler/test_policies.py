"""What each policy puts into a step, on hand-made states."""

from __future__ import annotations

from copy import deepcopy

import pytest

from workers.scheduler.draft import MAX_OVERTAKES
from workers.scheduler.policy import make_policy, policy_names
from workers.scheduler.sequence import Sequence, SequenceKey
from workers.scheduler.state import Limits, SchedulerState, StepPlan


def sequence(
    name: str,
    rank: int,
    *,
    prompt: int,
    computed: int = 0,
    output: int = 0,
    held: int = 0,
    max_tokens: int = 8,
    band: int = 0,
) -> Sequence:
    return Sequence(
        SequenceKey(name, 0),
        rank,
        band,
        prompt,
        max_tokens,
        True,
        known=prompt + output,
        computed=computed,
        held_blocks=held,
    )


def decoding(name: str, rank: int, *, known: int, held: int, max_tokens: int = 8, band: int = 0) -> Sequence:
    return sequence(
        name, rank, prompt=known - 1, computed=known - 1, output=1, held=held, max_tokens=max_tokens, band=band
    )


def state(
    running: list[Sequence],
    waiting: list[Sequence],
    *,
    tokens: int = 16,
    slots: int = 8,
    blocks: int = 100,
    size: int = 4,
) -> SchedulerState:
    held = sum(each.held_blocks for each in running)
    return SchedulerState(
        Limits(tokens, slots, blocks, size), running=running, waiting=waiting, free_blocks=blocks - held
    )


def shares(plan: StepPlan) -> dict[str, int]:
    return {work.key.request_id: work.count for work in plan.work}


def names(keys: tuple[SequenceKey, ...]) -> list[str]:
    return [key.request_id for key in keys]


def test_decodes_come_first_then_the_unfinished_prefill_then_the_waiting() -> None:
    plan = make_policy("chunked").plan(
        state(
            [sequence("long", 0, prompt=30, computed=10, held=8), decoding("a", 1, known=5, held=2)],
            [sequence("new", 2, prompt=3), sequence("late", 3, prompt=3)],
            tokens=22,
        ),
        0.0,
    )
    assert [work.key.request_id for work in plan.work] == ["a", "long", "new"]
    assert shares(plan) == {"a": 1, "long": 20, "new": 1}
    assert names(plan.admitted) == ["new"]
    assert plan.waiting_by_reason == (("budget", 1),)


def test_chunked_never_exceeds_the_token_budget_and_continuous_never_cuts() -> None:
    setting = state([decoding("a", 0, known=5, held=2)], [sequence("long", 1, prompt=50), sequence("b", 2, prompt=4)])
    assert shares(make_policy("chunked").plan(setting, 0.0)) == {"a": 1, "long": 15}
    assert shares(make_policy("continuous").plan(setting, 0.0)) == {"a": 1, "long": 50}


def test_continuous_adds_further_prefills_only_while_they_fit_whole() -> None:
    waiting = [sequence("a", 0, prompt=6), sequence("b", 1, prompt=6), sequence("c", 2, prompt=6)]
    plan = make_policy("continuous").plan(state([], waiting), 0.0)
    assert shares(plan) == {"a": 6, "b": 6}
    assert plan.waiting_by_reason == (("budget", 1),)


def test_slots_are_a_budget_too() -> None:
    waiting = [sequence("a", 0, prompt=2), sequence("b", 1, prompt=2)]
    plan = make_policy("chunked").plan(state([], waiting, slots=1), 0.0)
    assert names(plan.admitted) == ["a"]
    assert plan.waiting_by_reason == (("slots", 1),)


def test_more_decodes_than_tokens_take_turns() -> None:
    running = [decoding(name, rank, known=5, held=2) for rank, name in enumerate("abc")]
    for each, iteration in zip(running, (7, 5, 6), strict=True):
        each.advanced_iteration = iteration
    assert set(shares(make_policy("chunked").plan(state(running, [], tokens=2), 0.0))) == {"b", "c"}


def test_admission_needs_the_whole_prompt_to_fit() -> None:
    running = [decoding("a", 0, known=33, held=9)]
    plan = make_policy("chunked").plan(state(running, [sequence("big", 1, prompt=8, max_tokens=1)], blocks=10), 0.0)
    assert plan.admitted == ()
    assert plan.waiting_by_reason == (("blocks", 1),)


def test_admission_needs_the_peak_to_fit_as_well() -> None:
    running = [decoding("a", 0, known=5, held=2, max_tokens=30)]
    newcomer = sequence("b", 1, prompt=5, max_tokens=30)
    assert make_policy("chunked").plan(state(running, [newcomer], blocks=12), 0.0).admitted == ()
    assert make_policy("chunked").plan(state(running, [newcomer], blocks=20), 0.0).admitted != ()


def test_alone_a_request_starts_whatever_its_estimate() -> None:
    plan = make_policy("chunked").plan(state([], [sequence("a", 0, prompt=5, max_tokens=4_000)], blocks=4), 0.0)
    assert names(plan.admitted) == ["a"]


def test_a_later_one_passes_a_blocked_head_only_if_it_is_gone_in_time() -> None:
    running = [decoding("a", 0, known=21, held=6, max_tokens=12)]
    head = sequence("head", 1, prompt=30, max_tokens=2)
    quick = sequence("quick", 2, prompt=3, max_tokens=3)
    slow = sequence("slow", 2, prompt=3, max_tokens=20)
    assert names(make_policy("chunked").plan(state(running, [head, quick], blocks=12), 0.0).admitted) == ["quick"]
    plan = make_policy("chunked").plan(state(running, [head, slow], blocks=12), 0.0)
    assert plan.admitted == ()
    assert plan.waiting_by_reason == (("blocks", 2),)


def test_a_head_that_was_passed_often_enough_is_passed_no_more() -> None:
    running = [decoding("a", 0, known=21, held=6, max_tokens=12)]
    head = sequence("head", 1, prompt=30, max_tokens=2)
    head.overtaken = MAX_OVERTAKES
    plan = make_policy("chunked").plan(
        state(running, [head, sequence("quick", 2, prompt=3, max_tokens=3)], blocks=12), 0.0
    )
    assert plan.admitted == ()


def test_the_victim_is_of_the_lowest_band_then_the_cheapest_per_block() -> None:
    needy = decoding("needy", 0, known=5, held=1)
    low = decoding("low", 1, known=8, held=2, band=1)
    high = sequence("high", 2, prompt=12, computed=2, held=3)
    plan = make_policy("chunked").plan(state([needy, low, high], [], blocks=6), 0.0)
    assert names(plan.preempted) == ["low"]
    low.band = 0
    plan = make_policy("chunked").plan(state([needy, low, high], [], blocks=6), 0.0)
    assert names(plan.preempted) == ["high"], "two tokens of recompute free three blocks"
    assert "needy" in shares(plan)


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    needy, other = decoding("needy", 0, known=5, held=1, max_tokens=2), decoding("other", 1, known=8, held=2)
    newcomer = sequence("new", 2, prompt=1, max_tokens=1)
    assert names(make_policy("chunked").plan(state([needy], [newcomer], blocks=3), 0.0).admitted) == ["new"]
    plan = make_policy("chunked").plan(state([needy, other], [newcomer], blocks=3), 0.0)
    assert names(plan.preempted) == ["other"]
    assert plan.admitted == ()
    assert plan.waiting_by_reason == (("blocks", 2),)


def test_a_victim_that_was_already_given_work_returns_its_tokens_and_all_its_blocks() -> None:
    early = decoding("early", 0, known=9, held=2, band=1)  # takes the last free block, then loses everything
    needy = decoding("needy", 1, known=13, held=3)
    also = decoding("also", 2, known=9, held=2)
    other = decoding("other", 3, known=5, held=1)
    plan = make_policy("chunked").plan(state([early, needy, also, other], [], tokens=3, blocks=9), 0.0)
    assert names(plan.preempted) == ["early"]
    assert shares(plan) == {"needy": 1, "also": 1, "other": 1}, "three blocks came back and one token of three"


def test_the_last_survivor_is_never_preempted_but_told_when_the_pool_is_too_small() -> None:
    lone = decoding("lone", 0, known=13, held=3)
    assert make_policy("chunked").plan(state([lone], [], blocks=4), 0.0).preempted == ()
    plan = make_policy("chunked").plan(state([lone], [], blocks=3), 0.0)
    assert plan.preempted == ()
    assert plan.unfit[0].detail == "13 tokens need 4 KV blocks of 4; this worker's whole pool has 3"


def test_a_prompt_larger_than_the_pool_is_unfit_and_blocks_nobody() -> None:
    plan = make_policy("chunked").plan(
        state([], [sequence("huge", 0, prompt=50), sequence("b", 1, prompt=3)], blocks=10), 0.0
    )
    assert [unfit.key.request_id for unfit in plan.unfit] == ["huge"]
    assert names(plan.admitted) == ["b"]


@pytest.mark.parametrize("policy", policy_names())
def test_planning_changes_nothing(policy: str) -> None:
    setting = state(
        [decoding("a", 0, known=5, held=1), decoding("b", 1, known=9, held=2)], [sequence("c", 2, prompt=9)], blocks=3
    )
    before = deepcopy(setting)
    first = make_policy(policy).plan(setting, 1.0)
    for now, then in zip(setting.running + setting.waiting, before.running + before.waiting, strict=True):
        assert vars(now) == vars(then)
    assert (setting.free_blocks, setting.batch) == (before.free_blocks, before.batch)
    assert make_policy(policy).plan(setting, 1.0) == first


def test_credit_is_what_the_peak_leaves_less_what_waits() -> None:
    idle = state([], [], blocks=20)
    assert idle.credit_blocks() == 20
    busy = state([decoding("a", 0, known=5, held=2, max_tokens=30)], [], blocks=20)
    assert busy.credit_blocks() == 20 - 9  # 5 + 28 slots in blocks of 4
    busy.waiting.append(sequence("b", 1, prompt=5, max_tokens=30))
    assert busy.credit_blocks() < 4
    assert state([decoding("a", 0, known=5, held=2)], [], slots=1).credit_blocks() == 0


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"unknown scheduling policy 'chunky'; known: chunked, continuous, dynamic, static"
    ):
        make_policy("chunky")


@pytest.mark.parametrize("field", ["chunk_tokens", "max_sequences", "total_blocks", "block_size"])
def test_limits_that_could_run_nothing_are_refused(field: str) -> None:
    values = {"chunk_tokens": 1, "max_sequences": 1, "total_blocks": 1, "block_size": 1, field: 0}
    with pytest.raises(ValueError, match=f"{field} must be at least 1"):
        Limits(**values)
