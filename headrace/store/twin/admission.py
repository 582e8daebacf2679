"""`admit`: caps, capacity and deadline are checked before anything is written; then the record binds or waits."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.store import limits
from headrace.store.interface import Refusal
from headrace.store.twin.binding import bind, claim_all, is_fenced, join, schedule
from headrace.store.twin.queueing import enqueue, estimate, wait_ms
from headrace.store.twin.slot import ROUTER, Slot, incarnations, is_quiet, room_of

Reply = list[object]


@dataclass(frozen=True)
class AdmitCall:
    """The argument list of `admit`, by position."""

    router: str
    request_id: str
    body: bytes
    tenant: str
    band: int
    n: int
    price: int
    cost: int
    """Prompt + n × max_tokens: what caps count and what a pool must be able to hold."""
    span: int
    """Prompt + max_tokens: what a context must be able to hold."""
    candidates: list[str]
    overlaps: list[list[object]]
    deadline_ms: int
    grace_ms: int
    background: int
    ttl_ms: int
    idempotency_key: str
    tenant_cap: int
    global_cap: int


def admit(s: Slot, *argument: object) -> Reply:
    call = AdmitCall(*argument)  # type: ignore[arg-type]
    if is_fenced(s, ROUTER, call.router):
        return [2]
    known = _known(s, call)
    if known:
        return known
    refusal = _over_cap(s, call) or _beyond_capacity(s, call)
    if refusal:
        return refusal
    target = _free_worker(s, call)
    requests, blocks = (0, 0) if target else estimate(s, call.band, call.tenant)
    eta = wait_ms(s, blocks)
    if 0 < call.deadline_ms < eta:
        return [0, Refusal.DEADLINE.value, call.deadline_ms, eta, eta - call.deadline_ms]
    _write(s, call)
    if target:
        bind(s, call.request_id, target, was_waiting=False)
    else:
        enqueue(s, call.request_id)
        claim_all(s, call.candidates, "")
    record = s.keys.request(call.request_id)
    holder = s.ks.hget(record, "holder") or ""
    if holder:
        requests, eta = 0, 0
    return [1, call.request_id, s.ks.hget(record, "state"), holder, s.ks.hnum(record, "epoch"), 0, requests, eta, s.now]


def _known(s: Slot, call: AdmitCall) -> Reply | None:
    request_id = call.request_id
    if call.idempotency_key:
        request_id = s.ks.get(s.keys.idempotency(call.tenant, call.idempotency_key)).decode() or request_id
    record = s.keys.request(request_id)
    state = s.ks.hget(record, "state")
    if state is None:
        return None
    position = s.ks.zrank(s.keys.queue, request_id) if state == "queued" else 0
    return [1, request_id, state, s.ks.hget(record, "holder"), s.ks.hnum(record, "epoch"), 1, position, 0, s.now]


def _over_cap(s: Slot, call: AdmitCall) -> Reply | None:
    caps = (
        (Refusal.TENANT_CAP, call.tenant_cap, s.ks.hnum(s.keys.account(call.tenant), "tokens")),
        (Refusal.GLOBAL_CAP, call.global_cap, s.ks.hnum(s.keys.meta, "tokens")),
    )
    for reason, cap, tokens in caps:
        over = tokens + call.cost - cap
        if cap > 0 and over > 0:
            retry = 0 if call.cost > cap else wait_ms(s, over // 16 + 1) or limits.RETRY_MS
            return [0, reason.value, cap, tokens + call.cost, retry]
    return None


def _beyond_capacity(s: Slot, call: AdmitCall) -> Reply | None:
    """What no worker could ever hold; with none alive the capacity recorded last counts."""
    most_context = most_pool = 0
    capacity = s.ks.hget(s.keys.meta, "capacity")
    if capacity is None:
        return [0, Refusal.NO_CAPACITY_KNOWN.value, 0, call.cost, limits.RETRY_MS]
    for pair in capacity.split(","):
        context, pool = (int(part) for part in pair.split(":"))
        if call.span <= context and call.cost <= pool:
            return None
        most_context, most_pool = max(most_context, context), max(most_pool, pool)
    if call.span > most_context:
        return [0, Refusal.TOO_LARGE.value, most_context, call.span, 0]
    return [0, Refusal.TOO_LARGE.value, most_pool, call.cost, 0]


def _free_worker(s: Slot, call: AdmitCall) -> str:
    """Push when there is room: the first candidate, else any open worker, that takes it; never past others."""
    if is_quiet(s) or s.ks.zcard(s.keys.queue) > 0:
        return ""
    workers = call.candidates + [w for w in s.ks.smembers(s.keys.open) if w not in call.candidates]
    for worker in workers[: limits.WORKERS_TRIED]:
        if room_of(s, worker).takes(call.price, call.cost, call.span, call.n):
            return worker
    return ""


def _write(s: Slot, call: AdmitCall) -> None:
    if s.ks.zscore(s.keys.lease, ROUTER + call.router) is None:
        join(s, ROUTER, call.router, incarnations(s, ROUTER, call.router.rsplit("~", 1)[0]))
    # Ranks rise strictly, so that arrivals within one millisecond keep their order.
    arrival = max(s.ks.hnum(s.keys.meta, "arrival") + 1, s.now * 1_000)
    s.ks.hset(s.keys.meta, {"arrival": arrival})
    record = s.keys.request(call.request_id)
    s.ks.hset(
        record,
        {
            "body": call.body,
            "tenant": call.tenant,
            "band": call.band,
            "n": call.n,
            "left": call.n,
            "state": "queued",
            "holder": "",
            "epoch": 0,
            "owner": call.router,
            "oepoch": 1,
            "rank": arrival + call.band * limits.BAND_HORIZON_MS * 1_000,
            "price": call.price,
            "cost": call.cost,
            "span": call.span,
            "deadline": s.now + call.deadline_ms if call.deadline_ms > 0 else 0,
            "grace": call.grace_ms,
            "background": call.background,
            "ttl": call.ttl_ms,
            "idem": call.idempotency_key,
        },
    )
    for worker, blocks in call.overlaps:
        s.ks.hset(record, {f"ov:{worker}": str(blocks)})
    if call.idempotency_key:
        s.ks.strings[s.keys.idempotency(call.tenant, call.idempotency_key)] = call.request_id.encode()
    s.ks.zadd(s.keys.own(call.router), call.request_id, s.now)
    s.ks.hincrby(s.keys.meta, "tokens", call.cost)
    s.ks.hincrby(s.keys.account(call.tenant), "tokens", call.cost)
    s.ks.hincrby(s.keys.account(call.tenant), "n", 1)
    schedule(s, call.request_id)
