"""Queue time by reason: it sums exactly, whatever happens to a sequence."""

from __future__ import annotations

import random

from workers.scheduler.sequence import SequenceKey
from workers.scheduler.state import StepPlan, Wait
from workers.scheduler.waits import WaitAccount

A, B = SequenceKey("a", 0), SequenceKey("b", 0)


def plan(*, admitted: tuple[SequenceKey, ...] = (), **waits: Wait) -> StepPlan:
    reasons = tuple((SequenceKey(name, 0), reason) for name, reason in waits.items())
    return StepPlan((), admitted=admitted, preempted=(), waits=reasons)


def test_time_belongs_to_the_reason_given_at_its_beginning() -> None:
    account = WaitAccount()
    account.arrived(A, 10.0)
    account.planned(plan(a=Wait.BLOCKS), 10.5)
    account.planned(plan(a=Wait.BLOCKS), 11.0)
    account.planned(plan(a=Wait.SLOTS), 13.0)
    account.planned(plan(admitted=(A,)), 13.25)
    assert account.totals_s() == (("blocks", 2.5), ("slots", 0.25), ("boundary", 0.5))
    assert len(account) == 0
    account.planned(plan(), 20.0)
    account.ended(A, 30.0)
    assert sum(seconds for _, seconds in account.totals_s()) == 3.25, "nothing is charged while it runs"


def test_the_preempted_wait_again_and_the_cancelled_no_more() -> None:
    account = WaitAccount()
    account.arrived(A, 0.0)
    account.planned(plan(admitted=(A,)), 0.0)
    account.planned(plan(a=Wait.BLOCKS), 5.0)
    account.ended(A, 7.0)
    account.planned(plan(), 9.0)
    assert account.totals_s() == (("blocks", 2.0),)


def test_what_nobody_knows_ends_without_a_trace() -> None:
    account = WaitAccount()
    account.ended(B, 1.0)
    assert account.totals_ns() == {}


def test_the_reasons_sum_to_the_queue_time_to_the_nanosecond() -> None:
    """Random lives against a plain sum of (start of waiting, end of waiting)."""
    dice, account, now = random.Random(3), WaitAccount(), 1_234_567.891
    since: dict[SequenceKey, float] = {}
    queued_ns = 0
    for i in range(3_000):
        now += dice.random() / 7
        if dice.random() < 0.3:
            key = SequenceKey(f"r{i}", 0)
            account.arrived(key, now)
            since[key] = now
            now += dice.random() / 1_000
        started = tuple(key for key in since if dice.random() < 0.05)
        gone = [key for key in since if key not in started and dice.random() < 0.02]
        for key in gone:
            account.ended(key, now)
        left = {key: dice.choice(list(Wait)) for key in since if key not in started and key not in gone}
        account.planned(StepPlan((), admitted=started, waits=tuple(left.items())), now)
        for key in (*started, *gone):
            queued_ns += round(now * 1e9) - round(since.pop(key) * 1e9)
    for key in list(since):
        account.ended(key, now)
        queued_ns += round(now * 1e9) - round(since.pop(key) * 1e9)
    assert sum(account.totals_ns().values()) == queued_ns > 0
