"""Admission's refusals, the fair order of those that wait, and what a claim may overtake."""

from __future__ import annotations

from headrace.frame import FinishReason
from headrace.store.interface import Admitted, Refusal, Refused, State
from headrace.store.limits import HAND_BACKS, SKIP_LIMIT
from tests.contract.store_pair import OTHER_WORKER, ROUTER, WORKER, StorePair, part


async def claimed(pair: StorePair, **room: int) -> list[str]:
    """Ids that one report with this room claims, in order."""
    before = pair.link.inbox(WORKER, "0-0", 0)
    last = before[-1].id if before else "0-0"
    pair.report(WORKER, seen=last, **room)
    return [entry.request_id for entry in pair.link.inbox(WORKER, last, 0)]


async def test_refusals_say_what_was_hit(pair: StorePair) -> None:
    async def refusal(**settings: object) -> Refused:
        reply = await pair.admit("q1", **settings)
        assert isinstance(reply, Refused)
        return reply

    assert (await refusal()).reason is Refusal.NO_CAPACITY_KNOWN
    pair.report(WORKER, credit=0)
    assert (await refusal(model="another")).reason is Refusal.WRONG_MODEL
    too_large = await refusal(max_tokens=1_500)
    assert (too_large.reason, too_large.limit, too_large.asked) == (Refusal.TOO_LARGE, 1_024, 1_520)
    assert (await refusal(n=3, max_tokens=900)).limit == 128 * 16
    await pair.admit("held", tenant="acme")
    tenant = await refusal(tenant="acme", tenant_cap_tokens=40)
    assert (tenant.reason, tenant.limit, tenant.asked) == (Refusal.TENANT_CAP, 40, 64)
    assert tenant.retry_after_ms > 0
    everybody = await refusal(tenant="other", tenant_cap_tokens=40, global_cap_tokens=40)
    assert everybody.reason is Refusal.GLOBAL_CAP
    assert (await pair.router.census()).waiting_tokens == 32
    assert isinstance(await pair.admit("q2", tenant="other", tenant_cap_tokens=32), Admitted)


async def test_a_known_request_comes_back_as_it_is(pair: StorePair) -> None:
    pair.report(WORKER)
    first = await pair.admit("q1", idempotency_key="k", tenant="acme")
    again = await pair.admit("q2", idempotency_key="k", tenant="acme", tenant_cap_tokens=1)
    other = await pair.admit("q3", idempotency_key="k", tenant="other")
    same = await pair.admit("q1", tenant="acme")
    assert isinstance(again, Admitted)
    assert isinstance(same, Admitted)
    assert isinstance(other, Admitted)
    assert isinstance(first, Admitted)
    assert (again.request_id, again.existing, again.worker) == ("q1", True, WORKER)
    assert (same.existing, other.existing, other.request_id, first.existing) == (True, False, "q3", False)
    assert await pair.router.status("q2") is None


async def test_the_first_candidate_with_room_gets_it(pair: StorePair) -> None:
    pair.report(WORKER, credit=1)
    pair.report(OTHER_WORKER, credit=9)
    one = await pair.admit("q1", price_blocks=4, candidates=("gone~1", OTHER_WORKER, WORKER))
    two = await pair.admit("q2", price_blocks=4, candidates=(OTHER_WORKER,))
    assert isinstance(one, Admitted)
    assert isinstance(two, Admitted)
    assert (one.worker, two.worker) == (OTHER_WORKER, OTHER_WORKER)
    assert {row.worker: row.credit_blocks for row in await pair.router.board()} == {WORKER: 1, OTHER_WORKER: 1}
    three = await pair.admit("q3", price_blocks=4, candidates=(OTHER_WORKER,))
    assert isinstance(three, Admitted)
    assert three.worker == WORKER, "an empty worker starts whatever fits its pool"


async def test_slots_bound_credit_too(pair: StorePair) -> None:
    pair.report(WORKER, slots=1)
    await pair.bound("q1")
    queued = await pair.admit("q2")
    assert isinstance(queued, Admitted)
    assert queued.state is State.QUEUED
    assert (await pair.router.board())[0].credit_blocks == 0


async def test_tenants_take_turns(pair: StorePair) -> None:
    pair.report(WORKER, credit=0)
    for at in range(4):
        await pair.admit(f"a{at}", tenant="a")
    for at in range(2):
        await pair.admit(f"b{at}", tenant="b")
    assert await claimed(pair, credit=8) == ["a0", "b0", "a1", "b1"]
    assert await claimed(pair, credit=8) == ["a2", "a3"]


async def test_a_low_band_waits_but_ages(pair: StorePair) -> None:
    pair.report(WORKER, credit=0)
    await pair.admit("low", band=1)
    await pair.admit("high")
    assert await claimed(pair, credit=2) == ["high"]
    pair.wait(60_001)
    pair.report(WORKER, credit=0)
    await pair.admit("later")
    assert await claimed(pair, credit=4) == ["low", "later"]


async def test_overlap_is_preferred_a_bounded_number_of_times(pair: StorePair) -> None:
    pair.report(WORKER, credit=0)
    await pair.admit("head")
    for at in range(SKIP_LIMIT + 2):
        await pair.admit(f"c{at}", overlap_blocks=((WORKER, 2),))
    order = [(await claimed(pair, credit=2))[0] for _ in range(SKIP_LIMIT + 1)]
    assert order[:SKIP_LIMIT] == [f"c{at}" for at in range(SKIP_LIMIT)]
    assert order[SKIP_LIMIT] == "head"


async def test_a_large_head_gets_its_worker_in_the_end(pair: StorePair) -> None:
    pair.report(WORKER, credit=2)
    await pair.bound("running")
    pair.report(WORKER, credit=0)
    await pair.admit("large", price_blocks=50)
    for at in range(SKIP_LIMIT + 3):
        await pair.admit(f"s{at}")
    for _ in range(SKIP_LIMIT):
        assert (await claimed(pair, credit=2))[0].startswith("s")
    assert await claimed(pair, credit=2) == []
    pair.report(OTHER_WORKER, credit=2)
    assert pair.link.inbox(OTHER_WORKER, "0-0", 0)[0].request_id == "large", "an empty worker takes it"


async def test_resumed_requests_go_first(pair: StorePair) -> None:
    pair.report(WORKER, credit=4)
    await pair.bound("q1")
    await pair.bound("q2")
    pair.report(WORKER, part("q2", 0, 9), credit=0)
    await pair.admit("q0")
    assert pair.link.release(WORKER, "q1", 1)
    assert not pair.link.release(WORKER, "q1", 1)
    assert pair.link.release(WORKER, "q2", 1)
    pair.report(OTHER_WORKER, credit=6)
    entries = pair.link.inbox(OTHER_WORKER, "0-0", 0)
    assert [e.request_id for e in entries] == ["q2", "q1", "q0"]
    assert entries[0].bound is not None
    assert (entries[0].epoch, entries[0].bound.journal) == (2, ((9,),))


async def test_unstarted_work_moves_only_where_there_is_room(pair: StorePair) -> None:
    pair.report(WORKER, credit=4)
    await pair.bound("q1")
    pair.report(WORKER, credit=0)
    assert not pair.link.release(WORKER, "q1", 1, only_if_room_elsewhere=True), "nobody else would take it"
    assert not pair.link.release(WORKER, "q1", 2, only_if_room_elsewhere=True), "not this binding"
    pair.report(OTHER_WORKER, credit=6)
    assert pair.link.release(WORKER, "q1", 1, only_if_room_elsewhere=True)
    entry = pair.link.inbox(OTHER_WORKER, "0-0", 0)[0]
    assert (entry.request_id, entry.epoch) == ("q1", 2)


async def test_unstarted_work_is_not_passed_to_and_fro_for_ever(pair: StorePair) -> None:
    """Each of two workers says that it has room, and cannot start it when it comes."""
    pair.report(WORKER, credit=4)
    await pair.bound("q1")
    pair.report(OTHER_WORKER, credit=4)
    holders, epoch = [WORKER, OTHER_WORKER], 1
    while pair.link.release(holders[0], "q1", epoch, only_if_room_elsewhere=True):
        holders.reverse()
        epoch += 1
        assert epoch <= 10, "it would go on for ever"
        status = await pair.router.status("q1")
        assert status is not None
        assert (status.worker, status.epoch) == (holders[0], epoch)
        pair.report(holders[1], credit=4)
    assert epoch == 1 + HAND_BACKS
    assert pair.link.release(holders[0], "q1", epoch), "a drain still hands it on"


async def test_a_wait_beyond_the_deadline_is_refused_with_the_number(pair: StorePair) -> None:
    pair.report(WORKER, credit=4)
    await pair.router.sweep(ROUTER)
    await pair.bound("q1", price_blocks=10)
    pair.report(WORKER, credit=0)
    for at in range(5):
        await pair.admit(f"w{at}", price_blocks=10)
    pair.wait(1_000)
    pair.report(WORKER, part("q1", 0, 1, finish=FinishReason.STOP), credit=0)
    await pair.router.sweep(ROUTER)
    queued = await pair.admit("patient", price_blocks=10)
    assert isinstance(queued, Admitted)
    assert (queued.queue_position, queued.eta_ms) == (5, 5_000)
    refused = await pair.admit("hasty", price_blocks=10, deadline_ms=4_000)
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.asked, refused.retry_after_ms) == (Refusal.DEADLINE, 6_000, 2_000)


async def test_the_board_never_goes_back(pair: StorePair) -> None:
    pair.report(WORKER, credit=10)
    pair.report(WORKER, credit=20)
    pair.seq = 0
    pair.report(WORKER, credit=99)
    row = (await pair.router.board())[0]
    assert (row.load.seq, row.credit_blocks) == (2, 20)
