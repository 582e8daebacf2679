"""When a batch goes, who is in it, how long it keeps its slots, and what pads it: on hand-made states."""

from __future__ import annotations

import pytest

from tests.unit.workers.scheduler.test_policies import decoding, names, sequence, shares, state
from workers.scheduler.batching import Dynamic, Static, batch_slots, first_batch
from workers.scheduler.policy import Policy
from workers.scheduler.sequence import Sequence
from workers.scheduler.state import Batch, Limits, SchedulerState


def waiting(count: int, prompt: int = 3, since_s: float = 0.0) -> list[Sequence]:
    made = [sequence(f"w{i}", i, prompt=prompt) for i in range(count)]
    for each in made:
        each.advanced_s = since_s
    return made


def running_batch(running: list[Sequence], others: list[Sequence], slots: int, **limits: int) -> SchedulerState:
    setting = state(running, others, **limits)  # the worker's own bound is wider
    setting.batch = Batch(slots, {each.key for each in running})
    return setting


@pytest.mark.parametrize("policy", [Static(0.5), Dynamic(0.5)])
def test_a_full_batch_goes_at_once_and_the_next_is_collected(policy: Policy) -> None:
    plan = policy.plan(state([], waiting(6), slots=4), 0.0)
    assert names(plan.admitted) == ["w0", "w1", "w2", "w3"]
    assert (plan.slots, plan.padding, plan.wake_at_s) == (4, (), None)
    assert plan.waiting_by_reason == (("batch", 2),)


def test_static_waits_a_fixed_time_and_dynamic_the_shorter_the_fuller_it_is() -> None:
    one, three = state([], waiting(1, since_s=2.0), slots=4), state([], waiting(3, since_s=2.0), slots=4)
    assert [Static(0.4).plan(setting, 2.0).wake_at_s for setting in (one, three)] == [2.4, 2.4]
    assert [Dynamic(0.4).plan(setting, 2.0).wake_at_s for setting in (one, three)] == pytest.approx([2.3, 2.1])


@pytest.mark.parametrize("policy", [Static(0.5), Dynamic(0.5)])
def test_held_back_until_the_time_out_of_the_oldest_ends_and_then_sent_as_it_is(policy: Policy) -> None:
    setting = state([], [*waiting(1), sequence("late", 9, prompt=5)], slots=4)
    setting.waiting[1].advanced_s = 0.2
    held = policy.plan(setting, 0.2)
    assert (held.work, held.slots, held.padding, held.waiting_by_reason) == ((), 0, (), (("batch", 2),))
    assert held.held == {each.key for each in setting.waiting}
    assert held.wake_at_s is not None
    sent = policy.plan(setting, held.wake_at_s)
    assert shares(sent) == {"w0": 3, "late": 5}
    assert (sent.slots, sent.padding, sent.held) == (2, (2,), frozenset())


def test_nobody_joins_a_running_batch_and_ended_members_leave_rows_of_padding() -> None:
    running = [decoding("a", 0, known=5, held=2), decoding("b", 1, known=7, held=2)]
    plan = Static(0.5).plan(running_batch(running, waiting(8), slots=4), 9.0)
    assert shares(plan) == {"a": 1, "b": 1}
    assert (plan.admitted, plan.slots, plan.padding) == ((), 4, (1, 1))
    assert plan.waiting_by_reason == (("batch", 8),)


def test_who_waits_longer_than_the_time_out_may_be_offered_elsewhere() -> None:
    setting = running_batch([decoding("a", 0, known=5, held=2)], waiting(2), slots=1)
    setting.waiting[1].advanced_s = 0.7
    assert Static(0.5).plan(setting, 1.0).held == {setting.waiting[1].key}


def test_prompts_are_padded_to_the_longest_whatever_chunk_tokens_says() -> None:
    prompts = [sequence("short", 0, prompt=50), sequence("long", 1, prompt=4_000)]
    setting = state([], prompts, tokens=512, slots=32, blocks=2_000)
    plan = Static(0.5).plan(setting, 1.0)
    assert shares(plan) == {"short": 50, "long": 4_000}
    assert plan.padding == (3_950,)


def test_a_member_that_lost_its_blocks_comes_back_before_newcomers_and_the_batch_is_wide_again() -> None:
    survivor, lost = decoding("a", 0, known=5, held=2), sequence("b", 1, prompt=6, output=3)
    setting = running_batch([survivor], [lost, sequence("early", -1, prompt=2)], slots=3)
    setting.batch.members.add(lost.key)
    plan = Dynamic(0.5).plan(setting, 9.0)
    assert names(plan.admitted) == ["b"]
    assert shares(plan) == {"a": 1, "b": 9}
    assert (plan.slots, plan.padding) == (3, (8, 9))


def test_a_batch_whose_members_all_lost_their_blocks_is_still_that_batch() -> None:
    setting = state([], waiting(3), slots=2)
    setting.batch = Batch(2, {setting.waiting[2].key})
    plan = Static(0.5).plan(setting, 9.0)
    assert names(plan.admitted) == ["w2"]
    assert (plan.slots, plan.padding) == (2, (3,))


def test_no_preempted_member_returns_in_the_step_that_preempts() -> None:
    needy, other = decoding("needy", 0, known=5, held=1), decoding("other", 1, known=8, held=2)
    plan = Static(0.5).plan(running_batch([needy, other], waiting(1), slots=2, blocks=3), 9.0)
    assert (names(plan.preempted), shares(plan), plan.padding) == (["other"], {"needy": 1}, (1,))
    assert plan.waiting_by_reason == (("blocks", 1), ("batch", 1))


def test_what_does_not_fit_the_pool_together_waits_for_the_next_batch() -> None:
    plan = Static(0.5).plan(state([], waiting(3, prompt=12), slots=3, blocks=7), 1.0)
    assert names(plan.admitted) == ["w0"]
    assert plan.slots == 1
    assert plan.waiting_by_reason == (("blocks", 2),)


def test_a_full_batch_is_bounded_by_sequences_and_by_the_tokens_of_a_step() -> None:
    bounds = ((512, 256), (16, 256), (512, 8))
    assert [batch_slots(Limits(tokens, sequences, 9, 9)) for tokens, sequences in bounds] == [32, 16, 8]


def test_the_rectangle_is_at_most_a_full_batch_of_prompts_of_chunk_tokens() -> None:
    limits = Limits(16, 4, 100, 4)  # 4 slots of 16 tokens: 64 rows
    assert len(first_batch(waiting(9, prompt=16), limits)) == 4
    assert len(first_batch(waiting(9, prompt=17), limits)) == 3
    assert len(first_batch([sequence("huge", 0, prompt=400), *waiting(3)], limits)) == 1
    assert len(first_batch([*waiting(3), sequence("huge", 9, prompt=400)], limits)) == 3


def test_one_that_no_pool_can_hold_is_told_and_the_others_go() -> None:
    plan = Static(0.5).plan(state([], [sequence("huge", 0, prompt=50), sequence("b", 1, prompt=3)], blocks=10), 1.0)
    assert [unfit.key.request_id for unfit in plan.unfit] == ["huge"]
    assert names(plan.admitted) == ["b"]
