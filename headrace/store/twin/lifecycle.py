"""What happens to a request beside frames: cancel, attach, end; and to incarnations: drain, leave, sweep."""

from __future__ import annotations

from headrace.store import limits
from headrace.store.interface import LEASE_MS
from headrace.store.keys import name_of
from headrace.store.twin.binding import (
    claim_all,
    end_and_tell,
    is_fenced,
    join,
    lapse,
    move_lost,
    purge,
    schedule,
)
from headrace.store.twin.slot import ROUTER, TERMINAL, WORKER, Slot, incarnations, is_quiet, order_drain, tell_worker

Reply = list[object]


def cancel(s: Slot, request_id: str, owner_epoch: int) -> Reply:
    """`owner_epoch` -1: an explicit cancel; else a disconnect of that owner epoch, which may have a grace."""
    record = s.keys.request(request_id)
    state = s.ks.hget(record, "state")
    if state is None:
        return []
    if state in TERMINAL:
        return [state]
    if owner_epoch >= 0:
        if owner_epoch != s.ks.hnum(record, "oepoch") or s.ks.hget(record, "background") == "1":
            return [state]
        if s.ks.hnum(record, "grace") > 0:
            if s.ks.hnum(record, "grace_end") == 0:
                s.ks.hset(record, {"grace_end": s.now + s.ks.hnum(record, "grace")})
                schedule(s, request_id)
            return [state]
    if state == "queued":
        end_and_tell(s, request_id, "cancelled", "cancelled", "")
        return ["cancelled"]
    _mark(s, request_id)
    return [state]


def _mark(s: Slot, request_id: str) -> None:
    """Marks a bound request and tells its holder, once."""
    record = s.keys.request(request_id)
    if s.ks.hget(record, "mark"):
        return
    holder, owner, epoch = (
        s.ks.hget(record, "holder") or "",
        s.ks.hget(record, "owner") or "",
        s.ks.hnum(record, "epoch"),
    )
    s.ks.hset(record, {"mark": "cancel", "cancel_end": s.now + limits.CANCEL_TIMEOUT_MS})
    s.ks.hset(s.keys.held(holder), {request_id: f"{epoch}:c:{owner}"})
    schedule(s, request_id)
    tell_worker(s, holder, "cancel", request_id, 0, epoch, owner)


def attach(s: Slot, request_id: str, router: str, tenant: str) -> Reply:
    """Each attach is a new ownership, also by the same router: the stream it replaces must end as moved."""
    if is_fenced(s, ROUTER, router):
        return [2]
    record = s.keys.request(request_id)
    state = s.ks.hget(record, "state")
    if state is None or s.ks.hget(record, "tenant") != tenant:
        return []
    if state in TERMINAL:
        return [request_id, state, "", s.ks.hnum(record, "epoch"), s.ks.hnum(record, "oepoch"), s.now]
    if s.ks.zscore(s.keys.lease, ROUTER + router) is None:
        join(s, ROUTER, router, incarnations(s, ROUTER, name_of(router)))
    s.ks.zrem(s.keys.own(s.ks.hget(record, "owner") or ""), request_id)
    s.ks.zadd(s.keys.own(router), request_id, s.now)
    owner_epoch = s.ks.hincrby(record, "oepoch", 1)
    s.ks.hset(record, {"owner": router, "grace_end": 0})
    schedule(s, request_id)
    holder, epoch = s.ks.hget(record, "holder") or "", s.ks.hnum(record, "epoch")
    if holder:
        mark = "c" if s.ks.hget(record, "mark") else ""
        s.ks.hset(s.keys.held(holder), {request_id: f"{epoch}:{mark}:{router}"})
        tell_worker(s, holder, "owner", request_id, 0, epoch, router)
    return [request_id, state, holder, epoch, owner_epoch, s.now]


def end(s: Slot, request_id: str, state: str, reason: str, detail: str) -> Reply:
    record = s.keys.request(request_id)
    if (s.ks.hget(record, "state") or "finished") in TERMINAL:
        return [0]
    end_and_tell(s, request_id, state, reason, detail)
    return [1]


def drain(s: Slot, worker_name: str) -> Reply:
    members = incarnations(s, WORKER, worker_name)
    for worker in members:
        order_drain(s, worker)
    return [1 if members else 0]


def leave(s: Slot, kind: str, member: str) -> Reply:
    if s.ks.zscore(s.keys.lease, kind + member) is None:
        return [0]
    lapse(s, kind, member)
    move_lost(s)
    claim_all(s, [], "")
    return [1]


def sweep(s: Slot, router: str) -> Reply:
    """Renews the caller, then a bounded amount of each upkeep. In quiet times deadlines pass but no lease lapses."""
    if is_fenced(s, ROUTER, router):
        return [1, [], [], [], [], 0, s.now]
    _watch_absence(s)
    if s.ks.zscore(s.keys.lease, ROUTER + router) is None:
        join(s, ROUTER, router, incarnations(s, ROUTER, name_of(router)))
    s.ks.zadd(s.keys.lease, ROUTER + router, s.now + LEASE_MS)
    quiet = is_quiet(s)
    workers: list[str] = []
    routers: list[str] = []
    if not quiet:
        for member in s.ks.zrange_up_to(s.keys.lease, s.now, limits.LAPSES):
            lapse(s, member[:2], member[2:])
            (workers if member.startswith(WORKER) else routers).append(member[2:])
    requeued, ended = move_lost(s)
    ended += _end_due(s)
    _measure_drain(s)
    for member in s.ks.zrange_up_to(s.keys.fenced, s.now, limits.LAPSES):
        s.ks.zrem(s.keys.fenced, member)
    claim_all(s, [], "")
    return [0, workers, routers, requeued, ended, int(quiet), s.now]


def _watch_absence(s: Slot) -> None:
    """A gap since the last sweep, or another life of the server: nobody lapses and nothing is claimed for one lease.

    After a gap in which nobody became late (all had left, or only routers were missing) there is nobody to protect.
    """
    last, run_id = s.ks.hnum(s.keys.meta, "swept"), s.ks.hget(s.keys.meta, "run")
    has_gap = s.now - last > LEASE_MS
    was_away = bool(s.ks.zrange_up_to(s.keys.lease, s.now, 1)) if has_gap else run_id != s.run_id
    if run_id is not None and was_away:
        s.ks.hset(s.keys.meta, {"quiet_until": s.now + LEASE_MS})
    s.ks.hset(s.keys.meta, {"swept": s.now, "run": s.run_id})


def _end_due(s: Slot) -> list[str]:
    ended = []
    for request_id in s.ks.zrange_up_to(s.keys.due, s.now, limits.DUES):
        record = s.keys.request(request_id)
        if (s.ks.hget(record, "state") or "finished") in TERMINAL:
            purge(s, request_id)
            continue
        if 0 < s.ks.hnum(record, "deadline") <= s.now:
            end_and_tell(s, request_id, "cancelled", "deadline", "the deadline passed")
        else:
            end_and_tell(s, request_id, "cancelled", "cancelled", "")
        ended.append(request_id)
    return ended


def _measure_drain(s: Slot) -> None:
    """Smoothed rate at which ended work gives blocks back, in blocks per 1,000 s, while somebody waits."""
    meta = s.keys.meta
    since, drained = s.ks.hnum(meta, "rate_at"), s.ks.hnum(meta, "drained")
    elapsed = s.now - since
    if elapsed < limits.RATE_WINDOW_MS:
        return
    gone = drained - s.ks.hnum(meta, "rate_drained")
    if since > 0 and gone > 0 and s.ks.zcard(s.keys.queue) > 0:
        measured, before = gone * 1_000_000 // elapsed, s.ks.hnum(meta, "rate")
        s.ks.hset(meta, {"rate": measured if before == 0 else (3 * before + measured) // 4})
    s.ks.hset(meta, {"rate_at": s.now, "rate_drained": drained})
