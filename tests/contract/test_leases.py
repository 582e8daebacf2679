"""Workers, routers and the store itself going away and coming back."""

from __future__ import annotations

import asyncio
import threading

from headrace.store.interface import LEASE_MS, Admitted, State
from tests.contract.store_pair import OTHER_ROUTER, OTHER_WORKER, ROUTER, WORKER, StorePair, part


async def live_on(pair: StorePair, ms: int, *, worker: str = "", router: str = ROUTER) -> None:
    """Time passes in sweeps; only the named ones renew. The one swept last is the caller's router."""
    for _ in range(ms // 500):
        pair.wait(500)
        if worker:
            pair.report(worker, credit=0)
        await pair.router.sweep(router)


async def test_a_lost_workers_requests_go_on_elsewhere(pair: StorePair) -> None:
    pair.report(WORKER)
    await pair.router.sweep(ROUTER)
    await pair.bound("q1")
    pair.report(WORKER, part("q1", 0, 5, 6))
    pair.report(OTHER_WORKER)
    pair.wait(LEASE_MS - 10)
    pair.report(OTHER_WORKER)
    assert (await pair.router.sweep(ROUTER)).workers_lost == ()
    pair.wait(10)
    swept = await pair.router.sweep(ROUTER)
    assert (swept.workers_lost, swept.requeued) == ((WORKER,), ("q1",))
    entry = pair.link.inbox(OTHER_WORKER, "0-0", 0)[0]
    assert entry.bound is not None
    assert (entry.epoch, entry.bound.journal) == (2, ((5, 6),))
    late = pair.report(WORKER, part("q1", 2, 7))
    assert late.fenced
    assert await pair.router.journal("q1", 0, 0) == (5, 6)
    pair.report(OTHER_WORKER, part("q1", 2, 8, epoch=2))
    assert await pair.router.journal("q1", 0, 0) == (5, 6, 8)


async def test_a_new_incarnation_fences_the_old_one(pair: StorePair) -> None:
    pair.report("worker~1")
    await pair.bound("q1")
    pair.report("worker~2")
    assert [e.request_id for e in pair.link.inbox("worker~2", "0-0", 0)] == ["q1"]
    assert pair.report("worker~1").fenced
    assert [row.worker for row in await pair.router.board()] == ["worker~2"]


async def test_a_worker_that_leaves_hands_back_at_once(pair: StorePair) -> None:
    pair.report(WORKER)
    await pair.bound("q1")
    pair.report(OTHER_WORKER)
    pair.link.leave(WORKER)
    assert [e.request_id for e in pair.link.inbox(OTHER_WORKER, "0-0", 0)] == ["q1"]
    pair.link.leave(WORKER)
    census = await pair.router.census()
    assert (census.workers, census.bound, (await pair.router.audit()).stray_keys) == (1, 1, 0)


async def test_drain_stops_credit_and_is_told_once(pair: StorePair) -> None:
    pair.report(WORKER)
    assert await pair.router.drain("worker")
    assert await pair.router.drain("worker")
    assert not await pair.router.drain("nobody")
    assert [e.kind for e in pair.link.inbox(WORKER, "0-0", 0)] == ["drain"]
    pair.report(WORKER)
    assert (await pair.router.board())[0].credit_blocks == 0
    queued = await pair.admit("q1")
    assert isinstance(queued, Admitted)
    assert queued.state is State.QUEUED


async def test_a_lost_routers_requests_keep_a_grace(pair: StorePair) -> None:
    pair.report(WORKER)
    await pair.router.sweep(OTHER_ROUTER)
    await pair.bound("q1")
    await pair.bound("q2")
    await pair.bound("q3", background=True)
    await live_on(pair, 14_000, worker=WORKER, router=OTHER_ROUTER)
    assert (await pair.router.census()).routers == 1
    assert (await pair.router.sweep(ROUTER)).fenced
    attached = await pair.router.attach("q1", OTHER_ROUTER, "default")
    assert attached is not None
    assert attached.owner_epoch == 2
    await live_on(pair, 6_000, worker=WORKER, router=OTHER_ROUTER)
    states = [status.state for q in ("q1", "q2", "q3") if (status := await pair.router.status(q))]
    assert states == [State.BOUND, State.CANCELLED, State.BOUND]
    assert (await pair.router.audit()).stray_keys == 0


async def test_after_a_gap_nobody_lapses_and_nothing_is_claimed_for_one_lease(pair: StorePair) -> None:
    pair.report(WORKER)
    await pair.router.sweep(ROUTER)
    await pair.bound("q1")
    pair.wait(60_000)
    swept = await pair.router.sweep(ROUTER)
    assert (swept.quiet, swept.workers_lost) == (True, ())
    pair.report(WORKER)
    queued = await pair.admit("q2")
    assert isinstance(queued, Admitted)
    assert queued.state is State.QUEUED
    await live_on(pair, LEASE_MS, worker=WORKER)
    assert pair.report(WORKER).claimed == 1


async def test_a_clean_start_on_old_data_serves_at_once(pair: StorePair) -> None:
    """Everybody had left: there is nobody to wait for, neither for the first worker nor for the first request."""
    pair.report(WORKER)
    await pair.router.sweep(ROUTER)
    pair.link.leave(WORKER)
    await pair.router.leave(ROUTER)
    pair.wait(60_000)
    pair.restart()
    pair.report("worker~2")
    assert not (await pair.router.sweep("router~2")).quiet
    admitted = await pair.admit("q1", router="router~2", candidates=("worker~2",))
    assert isinstance(admitted, Admitted)
    assert admitted.worker == "worker~2"


async def test_another_life_of_the_server_counts_as_a_gap(pair: StorePair) -> None:
    await pair.router.sweep(ROUTER)
    pair.wait(250)
    assert not (await pair.router.sweep(ROUTER)).quiet
    pair.restart()
    assert (await pair.router.sweep(ROUTER)).quiet


async def test_blocking_reads_wake_up(pair: StorePair) -> None:
    pair.report(WORKER)
    heard: list[str] = []
    reader = threading.Thread(
        target=lambda: heard.extend(entry.request_id for entry in pair.link.inbox(WORKER, "0-0", 1_900))
    )
    reader.start()
    delivery = asyncio.create_task(pair.router.deliveries(ROUTER, "0-0", 1_900))
    await pair.admit("q1")
    await asyncio.to_thread(reader.join, 5)
    assert heard == ["q1"]
    pair.report(WORKER, part("q1", 0, 4))
    entries = await asyncio.wait_for(delivery, 5)
    assert entries[0].parts[0].token_ids == (4,)
    assert await pair.router.deliveries(ROUTER, entries[-1].id, 20) == ()
