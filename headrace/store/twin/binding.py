"""Binding, claiming, handing back and ending: the moves of a request between its states."""

from __future__ import annotations

from headrace.store import limits
from headrace.store.interface import LEASE_MS
from headrace.store.parts import pack_part
from headrace.store.twin.queueing import Waiting, charge, dequeue, enqueue, look, refund, window
from headrace.store.twin.slot import (
    WORKER,
    Room,
    Slot,
    is_live,
    is_quiet,
    record_capacity,
    room_of,
    tell_router,
    tell_worker,
)


def bind(s: Slot, request_id: str, worker: str, *, was_waiting: bool) -> None:
    """One more epoch, held by `worker`, told through its inbox."""
    record = s.keys.request(request_id)
    tenant, owner = s.ks.hget(record, "tenant") or "", s.ks.hget(record, "owner") or ""
    price = s.ks.hnum(record, "price")
    charge(s, s.ks.hnum(record, "band"), tenant, price)
    if was_waiting:
        dequeue(s, request_id)
    epoch = s.ks.hincrby(record, "epoch", 1)
    s.ks.hset(record, {"state": "bound", "holder": worker})
    s.ks.hset(s.keys.held(worker), {request_id: f"{epoch}::{owner}"})
    tell_worker(s, worker, "bind", request_id, price, epoch, owner, s.ks.hnum(record, "n"))


def _overlap(s: Slot, entry: Waiting, worker: str) -> int:
    return s.ks.hnum(s.keys.request(entry.request_id), f"ov:{worker}")


def _reserved_here(s: Slot, head: Waiting, worker: str, room: Room) -> bool:
    """Whether the head, overtaken often enough, waits for this worker: then nobody overtakes it here."""
    holder = s.ks.hget(s.keys.meta, "reserve_worker") or ""
    if s.ks.hget(s.keys.meta, "reserve_id") != head.request_id or not is_live(s, WORKER + holder):
        if head.need > room.pool_tokens or head.span > room.context_tokens:
            return False
        s.ks.hset(s.keys.meta, {"reserve_id": head.request_id, "reserve_worker": worker})
        return True
    return holder == worker


def pick(s: Slot, worker: str, room: Room, waiting: list[Waiting]) -> int | None:
    """Index of the one to bind: the best prefix overlap among those that fit, resumed ones first, a bounded number of
    times past the head."""
    if not waiting:
        return None
    head = waiting[0]
    if head.skips >= limits.SKIP_LIMIT:
        if room.takes(head.price, head.need, head.span, head.choices):
            return 0
        if _reserved_here(s, head, worker, room):
            return None
    best: int | None = None
    best_overlap = -1
    for index, entry in enumerate(waiting):
        if best is not None and waiting[best].resumed and not entry.resumed:
            break
        if not room.takes(entry.price, entry.need, entry.span, entry.choices):
            continue
        overlap = _overlap(s, entry, worker)
        if overlap > best_overlap:
            best, best_overlap = index, overlap
    if best is not None and best > 0:
        head.skips = s.ks.hincrby(s.keys.request(head.request_id), "skips", 1)
    return best


def claim(s: Slot, worker: str, waiting: list[Waiting], most: int) -> int:
    """Binds waiting requests to one worker while it has room; removes them from `waiting`."""
    room = room_of(s, worker)
    bound = 0
    while bound < most and room.slots > 0:
        index = pick(s, worker, room, waiting)
        if index is None:
            break
        entry = waiting.pop(index)
        bind(s, entry.request_id, worker, was_waiting=True)
        room.take(entry.price, entry.choices)
        bound += 1
    return bound


def claim_for(s: Slot, worker: str) -> int:
    if is_quiet(s) or s.ks.zcard(s.keys.queue) == 0 or room_of(s, worker).slots < 1:
        return 0
    return claim(s, worker, window(s), limits.CLAIMS)


def claim_all(s: Slot, first: list[str], excluded: str) -> None:
    """Lets workers with room claim, `first` in their order, then the others that reported room."""
    if is_quiet(s) or s.ks.zcard(s.keys.queue) == 0:
        return
    workers = first + [w for w in s.ks.smembers(s.keys.open) if w not in first]
    waiting: list[Waiting] | None = None
    left = limits.CLAIMS
    for worker in workers[: limits.WORKERS_TRIED]:
        if left < 1:
            break
        if worker == excluded or room_of(s, worker).slots < 1:
            continue
        if waiting is None:
            waiting = window(s)
        left -= claim(s, worker, waiting, left)


def has_room_elsewhere(s: Slot, request_id: str, worker: str) -> bool:
    """Whether a worker other than its holder would take it now."""
    if is_quiet(s):
        return False
    entry = look(s, request_id, resumed=False)
    others = list(s.ks.smembers(s.keys.open))[: limits.WORKERS_TRIED]
    return any(
        room_of(s, other).takes(entry.price, entry.need, entry.span, entry.choices)
        for other in others
        if other != worker
    )


def requeue(s: Slot, request_id: str, worker: str) -> bool:
    """Takes a bound request from its holder back to the queue at its rank; one marked for cancelling ends instead."""
    record = s.keys.request(request_id)
    if s.ks.hget(record, "mark"):
        end_and_tell(s, request_id, "cancelled", "cancelled", "")
        return False
    s.ks.hdel(s.keys.held(worker), request_id)
    refund(s, s.ks.hnum(record, "band"), s.ks.hget(record, "tenant") or "", s.ks.hnum(record, "price"))
    enqueue(s, request_id)
    return True


def end_request(s: Slot, request_id: str, state: str, reason: str, detail: str) -> list[bytes]:
    """Makes a record terminal from any live state, gives its account back and starts its result's life.

    Choices without a finish get `reason`; their last parts are returned for the owner, who would else hear of no end.
    """
    record = s.keys.request(request_id)
    holder, owner = s.ks.hget(record, "holder") or "", s.ks.hget(record, "owner") or ""
    if s.ks.hget(record, "state") == "queued":
        dequeue(s, request_id)
    else:
        s.ks.hdel(s.keys.held(holder), request_id)
    parts: list[bytes] = []
    epoch = s.ks.hnum(record, "epoch")
    for choice in range(s.ks.hnum(record, "n")):
        if s.ks.hsetnx(record, f"f{choice}", reason):
            length = s.ks.strlen(s.keys.journal(request_id, choice)) // 4
            parts.append(pack_part(request_id, choice, length, b"", reason, detail))
    s.ks.zrem(s.keys.own(owner), request_id)
    _settle(s, s.ks.hget(record, "tenant") or "", s.ks.hnum(record, "cost"))
    if epoch > 0:
        s.ks.hincrby(s.keys.meta, "drained", s.ks.hnum(record, "price"))
    s.ks.hset(record, {"state": state, "holder": "", "detail": detail})
    s.ks.zadd(s.keys.due, request_id, s.now + s.ks.hnum(record, "ttl"))
    return parts


def end_and_tell(s: Slot, request_id: str, state: str, reason: str, detail: str) -> None:
    """Ends a request outside of a frame: the owner's stream gets the finish, the holder's inbox a cancel."""
    record = s.keys.request(request_id)
    holder, owner = s.ks.hget(record, "holder") or "", s.ks.hget(record, "owner") or ""
    if holder and not s.ks.hget(record, "mark"):
        tell_worker(s, holder, "cancel", request_id, 0, s.ks.hnum(record, "epoch"), owner)
    tell_router(s, owner, holder, 0, end_request(s, request_id, state, reason, detail))


def _settle(s: Slot, tenant: str, cost: int) -> None:
    s.ks.hincrby(s.keys.meta, "tokens", -cost)
    s.ks.hincrby(s.keys.account(tenant), "tokens", -cost)
    if s.ks.hincrby(s.keys.account(tenant), "n", -1) == 0:
        s.ks.delete(s.keys.account(tenant))


def purge(s: Slot, request_id: str) -> None:
    """Removes every key of an ended request."""
    record = s.keys.request(request_id)
    tenant, key = s.ks.hget(record, "tenant") or "", s.ks.hget(record, "idem") or ""
    if key and s.ks.get(s.keys.idempotency(tenant, key)) == request_id.encode():
        s.ks.delete(s.keys.idempotency(tenant, key))
    for choice in range(s.ks.hnum(record, "n")):
        s.ks.delete(s.keys.journal(request_id, choice))
        s.ks.delete(s.keys.logprobs(request_id, choice))
    s.ks.delete(s.keys.prompt_logprobs(request_id))
    s.ks.delete(record)
    s.ks.zrem(s.keys.due, request_id)


def schedule(s: Slot, request_id: str) -> None:
    """Sets the live request's entry in `due` to the first of its deadline, grace and cancel time-out."""
    record = s.keys.request(request_id)
    times = [t for t in (s.ks.hnum(record, name) for name in ("deadline", "grace_end", "cancel_end")) if t > 0]
    if times:
        s.ks.zadd(s.keys.due, request_id, min(times))
    else:
        s.ks.zrem(s.keys.due, request_id)


def lapse(s: Slot, kind: str, member: str) -> None:
    """Fences one incarnation: it may not come back, and what it holds is moved by `move_lost`."""
    s.ks.zrem(s.keys.lease, kind + member)
    s.ks.zadd(s.keys.fenced, kind + member, s.now + limits.FENCED_TTL_MS)
    if kind == WORKER:
        s.ks.hdel(s.keys.board, member)
        s.ks.srem(s.keys.open, member)
        s.ks.delete(s.keys.inbox(member))
        record_capacity(s)
        remains = s.ks.hlen(s.keys.held(member)) > 0
    else:
        s.ks.delete(s.keys.out(member))
        remains = s.ks.zcard(s.keys.own(member)) > 0
    if remains:
        s.ks.sadd(s.keys.lost, kind + member)


def move_lost(s: Slot) -> tuple[list[str], list[str]]:
    """Moves a bounded number of requests away from lost incarnations: (re-queued, ended)."""
    requeued: list[str] = []
    ended: list[str] = []
    left = limits.MOVES
    for lost in s.ks.smembers(s.keys.lost):
        if left < 1:
            break
        kind, member = lost[:2], lost[2:]
        if kind == WORKER:
            for request_id in s.ks.hkeys(s.keys.held(member))[:left]:
                (requeued if requeue(s, request_id, member) else ended).append(request_id)
                left -= 1
            remains = s.ks.hlen(s.keys.held(member)) > 0
        else:
            for request_id, _ in s.ks.zrange(s.keys.own(member), left):
                _orphan(s, request_id, member)
                left -= 1
            remains = s.ks.zcard(s.keys.own(member)) > 0
        if not remains:
            s.ks.srem(s.keys.lost, lost)
    return requeued, ended


def _orphan(s: Slot, request_id: str, router: str) -> None:
    """The owner died: the request runs on, and its grace counts from here."""
    s.ks.zrem(s.keys.own(router), request_id)
    record = s.keys.request(request_id)
    if s.ks.hget(record, "background") != "1" and s.ks.hnum(record, "grace_end") == 0:
        grace = max(limits.ROUTER_GRACE_MS, s.ks.hnum(record, "grace"))
        s.ks.hset(record, {"grace_end": s.now + grace})
        schedule(s, request_id)


def join(s: Slot, kind: str, member: str, older: list[str]) -> None:
    """Takes a new incarnation in and fences the older ones of its name."""
    for old in older:
        lapse(s, kind, old)
    s.ks.zadd(s.keys.lease, kind + member, s.now + LEASE_MS)


def is_fenced(s: Slot, kind: str, member: str) -> bool:
    return s.ks.zscore(s.keys.fenced, kind + member) is not None
