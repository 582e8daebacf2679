"""Blocks of a draft under sharing: nobody is credited with what others still hold, nothing is paid for twice."""

from __future__ import annotations

from workers.scheduler.draft import MAX_OVERTAKES_OF_A_TWIN
from workers.scheduler.policy import make_policy
from workers.scheduler.room import NO_HIT, Hit, Room
from workers.scheduler.sequence import Sequence, SequenceKey
from workers.scheduler.state import Limits, SchedulerState


class Tables:
    """Books made by hand: tables by name, hits by name."""

    def __init__(self, tables: dict[str, tuple[int, ...]], hits: dict[str, Hit] | None = None) -> None:
        self._tables = tables
        self._hits = hits or {}

    def hit_of(self, sequence: Sequence) -> Hit:
        return self._hits.get(sequence.key.request_id, NO_HIT)

    def shared_ids(self, key: SequenceKey) -> tuple[int, ...]:
        return tuple(block for block in self._tables[key.request_id] if self.references(block) > 1)

    def references(self, block_id: int) -> int:
        return sum(table.count(block_id) for table in self._tables.values())


def sequence(name: str, rank: int, *, known: int, computed: int = 0, held: int = 0, borrowed: int = 0) -> Sequence:
    return Sequence(
        SequenceKey(name, 0),
        rank,
        0,
        known,
        8,
        True,
        known=known,
        computed=computed,
        held_blocks=held,
        borrowed_blocks=borrowed,
    )


def test_two_victims_give_a_shared_block_back_with_the_second() -> None:
    a, b = sequence("a", 0, known=12, held=3), sequence("b", 1, known=12, held=3, borrowed=2)
    room = Room(Tables({"a": (0, 1, 2), "b": (0, 1, 3)}), free_blocks=0, block_size=4)
    assert (room.alone(a), room.alone(b)) == (1, 1)
    room.give_back(a)
    assert room.free == 1
    assert room.alone(b) == 3
    room.give_back(b)
    assert room.free == 4


def test_what_the_draft_booked_comes_back_with_the_victim() -> None:
    a = sequence("a", 0, known=13, held=3)
    room = Room(Tables({"a": (0, 1, 2)}), free_blocks=1, block_size=4)
    room.grow(a)
    assert room.free == 0
    room.give_back(a)
    assert room.free == 4


def test_a_cached_block_costs_the_first_that_takes_it_and_a_held_one_nobody() -> None:
    room = Room(Tables({"runs": (0,)}), free_blocks=10, block_size=4)
    hit = Hit(8, (0, 1))
    first, second = sequence("first", 0, known=12), sequence("second", 1, known=12)
    assert (room.borrowed(hit), room.price(first, hit)) == (1, 2)
    room.start(first, hit)
    assert room.free == 8
    assert (room.borrowed(hit), room.price(second, hit)) == (2, 1)
    room.start(second, hit)
    assert room.free == 7


def test_a_victim_that_frees_nothing_is_chosen_last() -> None:
    """`copy` has computed least, but all its blocks are `owner`'s too."""
    owner = sequence("owner", 0, known=13, computed=12, held=3)
    copy = sequence("copy", 2, known=8, computed=7, held=2, borrowed=2)
    other = sequence("other", 1, known=9, computed=8, held=3)
    tables = {"owner": (0, 1, 2), "copy": (0, 1), "other": (3, 4, 5)}
    state = SchedulerState(Limits(16, 8, 6, 4), running=[owner, copy, other], free_blocks=0, books=Tables(tables))
    plan = make_policy("chunked").plan(state, 0.0)
    assert [key.request_id for key in plan.preempted] == ["other"]
    assert {work.key.request_id for work in plan.work} == {"owner", "copy"}


def test_the_last_survivor_gets_what_sharers_held_together() -> None:
    """Four blocks in all; two sequences share three of them. When one is out, the other owns all it needs."""
    a = sequence("a", 0, known=13, computed=12, held=3)
    b = sequence("b", 1, known=17, computed=16, held=4, borrowed=3)
    state = SchedulerState(
        Limits(16, 8, 4, 4), running=[a, b], free_blocks=0, books=Tables({"a": (0, 1, 2), "b": (0, 1, 2, 3)})
    )
    plan = make_policy("chunked").plan(state, 0.0)
    assert not plan.unfit
    assert [key.request_id for key in plan.preempted] == ["b"]
    assert [work.key.request_id for work in plan.work] == ["a"]


def test_a_twin_waits_for_its_prefix_until_too_many_have_passed_it() -> None:
    running, twin = sequence("leader", 0, known=12, held=3), sequence("twin", 1, known=12)
    books = Tables({"leader": (0, 1, 2)}, {"twin": Hit(frontier=b"first block", pending=True)})
    state = SchedulerState(Limits(16, 8, 20, 4), running=[running], waiting=[twin], free_blocks=17, books=books)
    plan = make_policy("chunked").plan(state, 0.0)
    assert (plan.admitted, plan.waiting_by_reason) == ((), (("prefix", 1),))
    twin.overtaken = MAX_OVERTAKES_OF_A_TWIN
    assert make_policy("chunked").plan(state, 0.0).admitted == (twin.key,)


def test_of_twins_in_one_step_the_first_starts() -> None:
    twins = [sequence(f"twin{i}", i, known=9) for i in range(3)]
    stranger = sequence("stranger", 3, known=9)
    hits = {twin.key.request_id: Hit(frontier=b"first block") for twin in twins}
    hits["stranger"] = Hit(frontier=b"another")
    state = SchedulerState(Limits(64, 8, 40, 4), waiting=[*twins, stranger], free_blocks=40, books=Tables({}, hits))
    plan = make_policy("chunked").plan(state, 0.0)
    assert [key.request_id for key in plan.admitted] == ["twin0", "stranger"]
    assert plan.held == {twins[1].key, twins[2].key}


def test_what_nobody_owns_narrows_the_peak() -> None:
    """The sequence that brought five blocks has ended; its three borrowers still hold them."""
    running = [sequence(f"b{i}", i, known=21, computed=20, held=6, borrowed=5) for i in range(3)]
    state = SchedulerState(Limits(16, 8, 20, 4), running=running, free_blocks=20 - 8)
    assert state.unowned_blocks() == 5
    assert state.credit_blocks() <= 15 - 3
