"""Requests of several choices: one slot and one end each, one journal each, one price for all."""

from __future__ import annotations

import pytest

from headrace.errors import InvalidRequest
from headrace.frame import FinishReason
from headrace.store.interface import Admitted, Refusal, Refused, State
from headrace.store.limits import BANDS
from tests.contract.store_pair import OTHER_WORKER, WORKER, StorePair, part


async def test_every_choice_takes_a_slot(pair: StorePair) -> None:
    pair.report(WORKER, slots=4)
    entry = await pair.bound("q1", n=3)
    second = await pair.admit("q2", n=2)
    assert isinstance(second, Admitted)
    assert second.state is State.QUEUED, "one slot is left and it has two choices"
    pair.report(WORKER, slots=1, seen=entry.id)
    assert pair.link.inbox(WORKER, entry.id, 0) == ()
    pair.report(WORKER, slots=2, seen=entry.id)
    assert [e.request_id for e in pair.link.inbox(WORKER, entry.id, 0)] == ["q2"]
    assert (await pair.router.board())[0].credit_blocks == 0, "no slot is left until the next report"


async def test_a_claim_counts_the_slots_of_what_it_has_taken(pair: StorePair) -> None:
    pair.report(WORKER, credit=0)
    for name, n in (("a", 3), ("b", 3), ("c", 1)):
        await pair.admit(name, n=n)
    pair.report(WORKER, slots=5)
    assert [e.request_id for e in pair.link.inbox(WORKER, "0-0", 0)] == ["a", "c"]


async def test_more_choices_than_slots_start_on_a_worker_that_holds_nothing(pair: StorePair) -> None:
    pair.report(WORKER, slots=2)
    admitted = await pair.admit("q1", n=5)
    assert isinstance(admitted, Admitted)
    assert admitted.worker == WORKER
    assert (await pair.router.board())[0].credit_blocks == 0


async def test_caps_and_pools_count_the_prompt_once_and_every_output(pair: StorePair) -> None:
    pair.report(WORKER)
    asked = {"n": 5, "prompt": 20, "max_tokens": 12}
    for cap in ({"tenant_cap_tokens": 79}, {"global_cap_tokens": 79}):
        refused = await pair.admit("q0", **asked, **cap)
        assert isinstance(refused, Refused)
        assert (refused.limit, refused.asked) == (79, 80)
    assert isinstance(await pair.admit("q1", **asked, tenant_cap_tokens=80, global_cap_tokens=80), Admitted)
    large = await pair.admit("q2", n=3, prompt=200, max_tokens=800)
    assert isinstance(large, Refused)
    assert (large.reason, large.limit, large.asked) == (Refusal.TOO_LARGE, 2_048, 2_600)


async def test_parts_of_several_choices_come_in_one_frame_and_gap_one_by_one(pair: StorePair) -> None:
    pair.report(WORKER)
    await pair.bound("q1", n=3)
    reply = pair.report(
        WORKER, part("q1", 0, 1), part("q1", 1, 9, choice=1), part("q1", 0, 2, choice=2, finish=FinishReason.LENGTH)
    )
    assert (reply.resend, reply.dropped) == ((("q1", 1, 0),), ())
    pair.report(WORKER, part("q1", 0, 8, 9, choice=1), part("q1", 1, 3))
    status = await pair.router.status("q1")
    assert status is not None
    assert (status.journal_lengths, status.finishes, status.state) == ((2, 2, 1), ("", "", "length"), State.BOUND)
    told = [(p.choice, p.first_index, p.token_ids) for p in await pair.delivered()]
    assert told == [(0, 0, (1,)), (2, 0, (2,)), (1, 0, (8, 9)), (0, 1, (3,))]


async def test_choices_that_ended_stay_ended_at_the_next_holder(pair: StorePair) -> None:
    pair.report(WORKER)
    await pair.bound("q1", n=2)
    pair.report(WORKER, part("q1", 0, 1, finish=FinishReason.STOP), part("q1", 0, 2, choice=1))
    assert pair.link.release(WORKER, "q1", 1)
    pair.report(OTHER_WORKER)
    [again] = pair.link.inbox(OTHER_WORKER, "0-0", 0)
    assert again.bound is not None
    assert again.bound.journal == ((1,), (2,))
    pair.report(
        OTHER_WORKER,
        part("q1", 1, epoch=2, finish=FinishReason.STOP),
        part("q1", 1, 3, epoch=2, choice=1, finish=FinishReason.LENGTH),
    )
    status = await pair.router.status("q1")
    assert status is not None
    assert (status.state, status.finishes) == (State.FINISHED, ("stop", "length"))
    told = [(p.choice, p.token_ids, p.finish) for p in await pair.delivered()]
    assert told == [(0, (1,), "stop"), (1, (2,), ""), (1, (3,), "length")], "the first one's end is told once"


async def test_a_cancel_ends_the_choices_that_run_and_leaves_the_ended_as_they_are(pair: StorePair) -> None:
    pair.report(WORKER)
    await pair.bound("q1", n=3)
    pair.report(WORKER, part("q1", 0, 1, finish=FinishReason.STOP), part("q1", 0, 2, choice=1))
    await pair.router.cancel("q1")
    assert pair.report(WORKER, part("q1", 1, 3, choice=1), part("q1", 0, 4, choice=2)).dropped == ("q1",)
    status = await pair.router.status("q1")
    assert status is not None
    assert (status.state, status.finishes) == (State.CANCELLED, ("stop", "cancelled", "cancelled"))
    ends = [(p.choice, p.finish) for p in await pair.delivered() if p.finish]
    assert ends == [(0, "stop"), (1, "cancelled"), (2, "cancelled")]


@pytest.mark.parametrize("band", [-1, BANDS])
async def test_an_unknown_band_is_refused_by_its_name(pair: StorePair, band: int) -> None:
    with pytest.raises(InvalidRequest, match=f"from 0 to {BANDS - 1}, not {band}") as told:
        await pair.admit("q1", band=band)
    assert told.value.field == "priority"
    assert isinstance(await pair.admit("q1", band=BANDS - 1), Refused), "only nobody's capacity is known yet"
