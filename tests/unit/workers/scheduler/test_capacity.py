"""Who may hold memory: the two answers, the order of those that wait, and whose blocks are taken."""

from __future__ import annotations

import pytest

from headrace.store.limits import BAND_HORIZON_MS, BANDS
from tests.unit.workers.scheduler.test_policies import decoding, names, sequence, shares, state
from workers.scheduler.capacity import NoEvict, OverCommit, capacity_names, make_capacity
from workers.scheduler.draft import MAX_OVERTAKES
from workers.scheduler.policy import make_policy
from workers.scheduler.room import Unshared
from workers.scheduler.sequence import MOST_PREEMPTIONS_IN_A_ROW, Sequence, SequenceKey, turn_of
from workers.scheduler.step_time import Features, StepTime

CHUNKED = make_policy("chunked")


class SharedPrefix(Unshared):
    """One sequence shares its first blocks with somebody outside."""

    def __init__(self, key: SequenceKey, ids: tuple[int, ...]) -> None:
        self._key, self._ids = key, ids

    def shared_ids(self, key: SequenceKey) -> tuple[int, ...]:
        return self._ids if key == self._key else ()

    def references(self, block_id: int) -> int:
        return 2 if block_id in self._ids else 1


def open_ended(name: str, rank: int, *, prompt: int, max_tokens: int) -> Sequence:
    """One that may stop before `max_tokens`."""
    made = sequence(name, rank, prompt=prompt, max_tokens=max_tokens)
    made.runs_to_the_end = False
    return made


def test_no_evict_counts_the_whole_length_where_over_commit_counts_the_estimate() -> None:
    given, short = sequence("a", 0, prompt=4, max_tokens=1_000), OverCommit()
    given.runs_to_the_end = False
    for _ in range(20):
        short.finished(10)
    assert NoEvict().to_come(given) == 1_000
    assert short.to_come(given) < 16
    short.preempted()
    assert short.to_come(given) > 200, "blocks ran out: estimates are trusted less"


def test_no_evict_lets_nobody_use_what_another_will_give_back() -> None:
    running = [decoding("a", 0, known=21, held=6, max_tokens=4)]  # 23 slots at its end: 6 blocks
    newcomer = sequence("b", 1, prompt=3, max_tokens=26)  # 28 slots: 7 blocks; a is gone long before
    given = state(running, [newcomer], blocks=12)
    assert names(CHUNKED.plan(given, 0.0).admitted) == ["b"]
    given.capacity = NoEvict()
    assert CHUNKED.plan(given, 0.0).admitted == ()
    given = state(running, [newcomer], blocks=13)
    given.capacity = NoEvict()
    assert names(CHUNKED.plan(given, 0.0).admitted) == ["b"]


def test_no_evict_gives_credit_for_what_is_not_reserved() -> None:
    given = state([decoding("a", 0, known=5, held=2, max_tokens=30)], [], blocks=20)
    given.capacity = NoEvict()
    assert given.credit_blocks() == 20 - 9, "5 + 28 slots in blocks of 4"
    given.waiting.append(open_ended("b", 1, prompt=5, max_tokens=30))
    assert given.credit_blocks() == 20 - 9 - 9


def test_no_evict_backfills_only_what_the_reserved_head_leaves() -> None:
    running = [decoding("a", 0, known=21, held=6, max_tokens=12)]  # 31 slots: 8 blocks, gone after 11 more tokens
    head = sequence("head", 1, prompt=38, max_tokens=3)  # 40 slots: 10 of 12 blocks
    quick, small, large = (
        sequence(name, 2, prompt=3, max_tokens=m) for name, m in (("quick", 9), ("small", 4), ("large", 14))
    )
    for later, passes in ((quick, True), (small, True), (large, False)):
        given = state(running, [head, later], blocks=12)
        given.capacity = NoEvict()
        assert (names(CHUNKED.plan(given, 0.0).admitted) == [later.key.request_id]) is passes


def test_unknown_capacities_are_refused_with_the_known_ones() -> None:
    assert capacity_names() == ("over-commit", "no-evict")
    with pytest.raises(ValueError, match="unknown capacity 'all'; known: over-commit, no-evict"):
        make_capacity("all")


def test_a_low_band_waits_behind_whoever_comes_within_its_horizon() -> None:
    horizon_s = BAND_HORIZON_MS / 1_000
    low, high = turn_of(100.0, 1), turn_of(100.0 + horizon_s - 0.001, 0)
    assert high < low < turn_of(100.0 + horizon_s + 0.001, 0)
    assert turn_of(0.0, 99) == (BANDS - 1) * horizon_s
    assert turn_of(0.0, -1) == 0.0


def test_no_blocked_one_is_passed_more_often_than_the_bound_whoever_leads() -> None:
    running = [decoding("a", 0, known=21, held=6, max_tokens=12)]
    head, second = sequence("head", 1, prompt=30, max_tokens=2), sequence("second", 2, prompt=30, max_tokens=2)
    second.overtaken = MAX_OVERTAKES - 1  # under an earlier head
    quick = [sequence(f"quick{i}", 3 + i, prompt=1, max_tokens=2) for i in range(3)]
    plan = CHUNKED.plan(state(running, [head, second, *quick], blocks=12), 0.0)
    assert names(plan.admitted) == ["quick0"]


def test_the_victim_costs_the_fewest_seconds_per_block_freed() -> None:
    """Per token the long one is dearer by three in 1 000, per second by far: its attention is quadratic."""
    needy = decoding("needy", 0, known=5, held=1)
    long, short = decoding("long", 1, known=4_001, held=1_001), decoding("short", 2, known=5, held=1)
    given = state([needy, long, short], [], blocks=1_003)
    assert names(CHUNKED.plan(given, 0.0).preempted) == ["long"], "4 000 tokens free 1 001 blocks: 3.996 a block"
    given.step_time = StepTime.of(Features(prefill_tokens=1e-5, attended_pairs=1e-8))
    assert names(CHUNKED.plan(given, 0.0).preempted) == ["short"]


def test_what_others_keep_costs_nothing_and_frees_nothing() -> None:
    """Of the sharer's ten blocks eight are others' as well: it would free two and compute 4 tokens again for them.
    The other one would free three and compute 12 again.
    """
    needy = decoding("needy", 0, known=5, held=1)
    other = decoding("other", 1, known=13, held=3, band=1)
    sharer = decoding("sharer", 2, known=37, held=10, band=1)
    given = state([needy, other, sharer], [], blocks=14)
    assert names(CHUNKED.plan(given, 0.0).preempted) == ["sharer"], "36 tokens free ten blocks: 3.6 a block"
    given.step_time = StepTime.of(Features(prefill_tokens=1e-5, attended_pairs=3e-7))
    assert names(CHUNKED.plan(given, 0.0).preempted) == ["other"], "to prefill 36 anew is dearer per block"
    given.books = SharedPrefix(sharer.key, tuple(range(8)))
    assert names(CHUNKED.plan(given, 0.0).preempted) == ["sharer"], "eight of its blocks stay"


def test_who_lost_its_blocks_twice_for_nothing_is_nobodys_victim() -> None:
    needy, cheap, dear = (
        decoding(name, rank, known=8 * rank + 5, held=2 * rank + 1) for rank, name in enumerate("ncd")
    )
    cheap.band = 1
    given = state([needy, cheap, dear], [], blocks=9)
    assert names(CHUNKED.plan(given, 0.0).preempted) == ["c"]
    cheap.preempted_in_a_row = MOST_PREEMPTIONS_IN_A_ROW
    plan = CHUNKED.plan(given, 0.0)
    assert "c" in shares(plan)
    assert "c" not in names(plan.preempted)


def test_the_protected_come_back_only_when_they_fit_whole_beside_each_other() -> None:
    """18 slots, 5 blocks each at their ends; at their joint peak 7 would do, and that is not enough here."""
    first, second = (open_ended(name, rank, prompt=4, max_tokens=15) for rank, name in enumerate(("first", "second")))
    first.known, first.computed, first.held_blocks = 17, 16, 4
    assert names(CHUNKED.plan(state([first], [second], blocks=9), 0.0).admitted) == ["second"]
    for each in (first, second):
        each.preempted_in_a_row = MOST_PREEMPTIONS_IN_A_ROW
    assert CHUNKED.plan(state([first], [second], blocks=9), 0.0).admitted == ()
    assert names(CHUNKED.plan(state([first], [second], blocks=10), 0.0).admitted) == ["second"]
