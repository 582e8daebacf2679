"""One request from admission to the end of its result, and what repeats, gaps and cancels do to it."""

from __future__ import annotations

from headrace.frame import FinishReason
from headrace.store.interface import Admitted, State
from tests.contract.store_pair import OTHER_WORKER, ROUTER, WORKER, StorePair, part


async def test_a_request_runs_finishes_and_leaves_nothing(pair: StorePair) -> None:
    pair.report(WORKER)
    entry = await pair.bound("q1", result_ttl_ms=5_000, idempotency_key="once")
    assert entry.bound is not None
    assert entry.bound.request.prompt_token_ids == tuple(range(1, 21))
    assert (entry.kind, entry.epoch, entry.bound.owner, entry.bound.journal) == ("bind", 1, ROUTER, ((),))
    assert (await pair.router.board())[0].credit_blocks == 98
    pair.report(WORKER, part("q1", 0, 7), seen=entry.id)
    pair.report(WORKER, part("q1", 1, 8, 9, finish=FinishReason.STOP), seen=entry.id)
    told = [(p.request_id, p.first_index, p.token_ids, p.finish) for p in await pair.delivered()]
    assert told == [("q1", 0, (7,), ""), ("q1", 1, (8, 9), "stop")]
    status = await pair.router.status("q1")
    assert status is not None
    assert (status.state, status.journal_lengths, status.finishes) == (State.FINISHED, (3,), ("stop",))
    assert await pair.router.journal("q1", 0, 1) == (8, 9)
    assert await pair.router.owned(ROUTER) == ()
    assert (await pair.router.audit()).ended == 1
    pair.wait(5_000)
    pair.report(WORKER, seen=entry.id)
    await pair.router.sweep(ROUTER)
    census, audit = await pair.router.census(), await pair.router.audit()
    assert (audit.ended, census.bound, census.waiting, audit.stray_keys) == (0, 0, 0, 0)
    assert await pair.router.status("q1") is None


async def test_a_part_lands_only_at_the_journals_end(pair: StorePair) -> None:
    pair.report(WORKER)
    await pair.bound("q1")
    assert pair.report(WORKER, part("q1", 2, 5)).resend == (("q1", 0, 0),)
    assert pair.report(WORKER, part("q1", 0, 1, 2)).resend == ()
    assert pair.report(WORKER, part("q1", 0, 1, 2)).resend == ()
    assert pair.report(WORKER, part("q1", 1, 2, 3)).resend == ()
    assert pair.report(WORKER, part("q1", 9, finish=FinishReason.STOP)).resend == (("q1", 0, 3),)
    assert await pair.router.journal("q1", 0, 0) == (1, 2, 3)
    assert [(p.first_index, p.token_ids) for p in await pair.delivered()] == [(0, (1, 2)), (2, (3,))]


async def test_parts_of_another_epoch_or_holder_are_dropped(pair: StorePair) -> None:
    pair.report(WORKER)
    pair.report(OTHER_WORKER, credit=0)
    await pair.bound("q1")
    assert pair.report(WORKER, part("q1", 0, 1, epoch=2)).dropped == ("q1",)
    assert pair.report(OTHER_WORKER, part("q1", 0, 1), credit=0).dropped == ("q1",)
    assert pair.report(WORKER, part("nobody", 0, 1)).dropped == ("nobody",)
    assert await pair.router.journal("q1", 0, 0) == ()


async def test_all_choices_must_finish(pair: StorePair) -> None:
    pair.report(WORKER)
    await pair.bound("q1", n=2)
    pair.report(WORKER, part("q1", 0, 4, finish=FinishReason.STOP), part("q1", 0, 5, choice=1))
    status = await pair.router.status("q1")
    assert status is not None
    assert (status.state, status.finishes) == (State.BOUND, ("stop", ""))
    pair.report(WORKER, part("q1", 1, choice=1, finish=FinishReason.FAILED))
    status = await pair.router.status("q1")
    assert status is not None
    assert (status.state, status.finishes) == (State.FAILED, ("stop", "failed"))


async def test_cancel_of_one_that_waits_ends_it_and_tells_the_router(pair: StorePair) -> None:
    pair.report(WORKER, credit=0)
    admitted = await pair.admit("q1")
    assert isinstance(admitted, Admitted)
    assert (admitted.state, admitted.worker) == (State.QUEUED, "")
    assert await pair.router.cancel("q1") is State.CANCELLED
    assert [(p.request_id, p.finish) for p in await pair.delivered()] == [("q1", "cancelled")]
    assert await pair.router.cancel("q1") is State.CANCELLED
    assert len(await pair.delivered()) == 1
    assert await pair.router.cancel("nobody") is None


async def test_cancel_of_a_bound_one_is_ended_by_its_worker(pair: StorePair) -> None:
    pair.report(WORKER)
    entry = await pair.bound("q1")
    assert await pair.router.cancel("q1") is State.BOUND
    assert await pair.router.cancel("q1") is State.BOUND
    assert [e.kind for e in pair.link.inbox(WORKER, entry.id, 0)] == ["cancel"]
    pair.report(WORKER, part("q1", 0, 3, finish=FinishReason.CANCELLED))
    status = await pair.router.status("q1")
    assert status is not None
    assert (status.state, status.journal_lengths) == (State.CANCELLED, (1,))


async def test_a_cancelled_one_gets_at_most_one_more_iteration(pair: StorePair) -> None:
    pair.report(WORKER)
    await pair.bound("q1")
    await pair.router.cancel("q1")
    assert pair.report(WORKER, part("q1", 0, 3)).dropped == ("q1",)
    assert [(p.token_ids, p.finish) for p in await pair.delivered()] == [((3,), ""), ((), "cancelled")]


async def test_a_cancel_that_no_worker_ends_is_ended_by_sweep(pair: StorePair) -> None:
    pair.report(WORKER)
    await pair.bound("q1")
    await pair.router.sweep(ROUTER)
    await pair.router.cancel("q1")
    for _ in range(6):
        pair.wait(1_000)
        pair.report(WORKER)
        await pair.router.sweep(ROUTER)
    assert [p.finish for p in await pair.delivered()] == ["cancelled"]


async def test_a_disconnect_of_a_stale_owner_does_nothing(pair: StorePair) -> None:
    pair.report(WORKER)
    entry = await pair.bound("q1", tenant="acme")
    assert await pair.router.attach("q1", "thief~1", "other tenant") is None
    attached = await pair.router.attach("q1", "second~1", "acme")
    assert attached is not None
    assert (attached.owner_epoch, attached.worker) == (2, WORKER)
    assert [(e.kind, e.owner) for e in pair.link.inbox(WORKER, entry.id, 0)] == [("owner", "second~1")]
    assert await pair.router.cancel("q1", owner_epoch=1) is State.BOUND
    pair.report(WORKER, part("q1", 0, 3))
    assert [p.token_ids for p in await pair.delivered("second~1")] == [(3,)]
    assert await pair.delivered() == []
    assert await pair.router.owned("second~1") == ("q1",)
    assert await pair.router.cancel("q1", owner_epoch=2) is State.BOUND
    assert pair.report(WORKER, part("q1", 1, 4)).dropped == ("q1",)


async def test_a_disconnect_with_grace_may_come_back(pair: StorePair) -> None:
    pair.report(WORKER)
    await pair.router.sweep(ROUTER)
    await pair.bound("q1", resume_grace_ms=2_000)
    assert await pair.router.cancel("q1", owner_epoch=1) is State.BOUND
    pair.wait(1_500)
    assert (await pair.router.sweep(ROUTER)).ended == ()
    await pair.router.attach("q1", ROUTER, "default")
    pair.wait(1_000)
    assert (await pair.router.sweep(ROUTER)).ended == ()
    await pair.router.cancel("q1", owner_epoch=2)
    pair.wait(2_000)
    pair.report(WORKER)
    assert (await pair.router.sweep(ROUTER)).ended == ("q1",)
    assert [p.finish for p in await pair.delivered()] == ["cancelled"]


async def test_a_deadline_ends_it_wherever_it_is(pair: StorePair) -> None:
    pair.report(WORKER)
    await pair.router.sweep(ROUTER)
    entry = await pair.bound("q1", deadline_ms=1_000)
    pair.report(WORKER, credit=0, seen=entry.id)
    await pair.admit("q2", deadline_ms=1_000)
    pair.wait(1_000)
    assert (await pair.router.sweep(ROUTER)).ended == ("q1", "q2")
    assert [(p.request_id, p.finish) for p in await pair.delivered()] == [("q1", "deadline"), ("q2", "deadline")]
    assert [e.kind for e in pair.link.inbox(WORKER, entry.id, 0)] == ["cancel"]
    assert pair.report(WORKER, part("q1", 0, 1)).dropped == ("q1",)


async def test_end_is_for_what_has_not_ended(pair: StorePair) -> None:
    pair.report(WORKER, credit=0)
    await pair.admit("q1")
    assert await pair.router.end("q1", State.FAILED, "no such adapter")
    assert not await pair.router.end("q1", State.FAILED, "again")
    assert not await pair.router.end("nobody", State.FAILED, "")
    assert [(p.finish, p.detail) for p in await pair.delivered()] == [("failed", "no such adapter")]
