"""Waiting: fair order over tenants (virtual token counters, start-time fair), priority bands, estimated wait.

After Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), with start-time fair queueing's virtual
time (Goyal et al., 1996) as the lift of tenants that come back.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.store import limits
from headrace.store.twin.slot import Slot


def virtual_counter(s: Slot, band: int, tenant: str) -> int:
    """Where the tenant stands: its counter while it waits, else what it left with, lifted to the virtual time."""
    waiting = s.ks.zscore(s.keys.fair(band), tenant)
    if waiting is not None:
        return waiting
    return max(s.ks.hnum(s.keys.account(tenant), f"vc:{band}"), s.ks.hnum(s.keys.meta, f"v:{band}"))


def set_counter(s: Slot, band: int, tenant: str, counter: int) -> None:
    if s.ks.zscore(s.keys.fair(band), tenant) is not None:
        s.ks.zadd(s.keys.fair(band), tenant, counter)
    else:
        s.ks.hset(s.keys.account(tenant), {f"vc:{band}": counter})


def charge(s: Slot, band: int, tenant: str, price: int) -> None:
    counter = virtual_counter(s, band, tenant)
    if counter > s.ks.hnum(s.keys.meta, f"v:{band}"):
        s.ks.hset(s.keys.meta, {f"v:{band}": counter})
    set_counter(s, band, tenant, counter + price)


def refund(s: Slot, band: int, tenant: str, price: int) -> None:
    waiting = s.ks.zscore(s.keys.fair(band), tenant)
    counter = waiting if waiting is not None else s.ks.hnum(s.keys.account(tenant), f"vc:{band}")
    set_counter(s, band, tenant, counter - price)


def has_tokens(s: Slot, request_id: str, choices: int) -> bool:
    return any(s.ks.strlen(s.keys.journal(request_id, choice)) > 0 for choice in range(choices))


def enqueue(s: Slot, request_id: str) -> None:
    """Puts a record to wait at its rank: in front of everybody once it has delivered tokens."""
    record = s.keys.request(request_id)
    band, rank, price = s.ks.hnum(record, "band"), s.ks.hnum(record, "rank"), s.ks.hnum(record, "price")
    tenant = s.ks.hget(record, "tenant") or ""
    s.ks.hset(record, {"state": "queued", "holder": ""})
    s.ks.zadd(s.keys.queue, request_id, rank)
    s.ks.hincrby(s.keys.meta, "waiting_tokens", s.ks.hnum(record, "cost"))
    if has_tokens(s, request_id, s.ks.hnum(record, "n")):
        s.ks.zadd(s.keys.resume, request_id, rank)
        return
    if s.ks.zscore(s.keys.fair(band), tenant) is None:
        s.ks.zadd(s.keys.fair(band), tenant, virtual_counter(s, band, tenant))
    s.ks.zadd(s.keys.wait(band, tenant), request_id, rank)
    s.ks.hincrby(s.keys.account(tenant), f"wp:{band}", price)


def dequeue(s: Slot, request_id: str) -> None:
    """The reverse of `enqueue`; the caller sets the state."""
    record = s.keys.request(request_id)
    band, price = s.ks.hnum(record, "band"), s.ks.hnum(record, "price")
    tenant = s.ks.hget(record, "tenant") or ""
    s.ks.zrem(s.keys.queue, request_id)
    s.ks.hincrby(s.keys.meta, "waiting_tokens", -s.ks.hnum(record, "cost"))
    if s.ks.zrem(s.keys.resume, request_id):
        return
    s.ks.zrem(s.keys.wait(band, tenant), request_id)
    s.ks.hincrby(s.keys.account(tenant), f"wp:{band}", -price)
    if s.ks.zcard(s.keys.wait(band, tenant)) == 0:
        s.ks.hset(s.keys.account(tenant), {f"vc:{band}": s.ks.zscore(s.keys.fair(band), tenant) or 0})
        s.ks.zrem(s.keys.fair(band), tenant)


@dataclass
class Waiting:
    """One waiting request as a claim sees it."""

    request_id: str
    price: int
    need: int
    """Tokens of pool it may come to hold."""
    span: int
    """Tokens of context of its longest choice."""
    choices: int
    skips: int
    resumed: bool


@dataclass
class Lane:
    """One tenant's waiting in one band, walked from its front."""

    band: int
    position: int
    """Virtual: the tenant's counter plus the prices before the next one."""
    ids: list[tuple[str, int]]
    next: int = 0

    @property
    def rank(self) -> int:
        return self.ids[self.next][1]


def look(s: Slot, request_id: str, resumed: bool) -> Waiting:
    record = s.keys.request(request_id)
    return Waiting(
        request_id,
        s.ks.hnum(record, "price"),
        s.ks.hnum(record, "cost"),
        s.ks.hnum(record, "span"),
        s.ks.hnum(record, "n"),
        s.ks.hnum(record, "skips"),
        resumed,
    )


def _lanes(s: Slot) -> list[Lane]:
    lanes = []
    for band in range(limits.BANDS):
        for tenant, counter in s.ks.zrange(s.keys.fair(band), limits.WINDOW):
            lanes.append(Lane(band, counter, s.ks.zrange(s.keys.wait(band, tenant), limits.WINDOW)))
    return lanes


def _next_lane(lanes: list[Lane]) -> Lane | None:
    """Within a band the least position goes first; between bands' firsts the least rank."""
    firsts: dict[int, Lane] = {}
    for lane in lanes:
        if lane.next < len(lane.ids) and (lane.band not in firsts or lane.position < firsts[lane.band].position):
            firsts[lane.band] = lane
    chosen = None
    for band in range(limits.BANDS):
        first = firsts.get(band)
        if first is not None and (chosen is None or first.rank < chosen.rank):
            chosen = first
    return chosen


def window(s: Slot) -> list[Waiting]:
    """The first waiting requests in fair order, those with delivered tokens in front."""
    found = [look(s, request_id, True) for request_id, _ in s.ks.zrange(s.keys.resume, limits.WINDOW)]
    if len(found) >= limits.WINDOW:
        return found
    lanes = _lanes(s)
    while len(found) < limits.WINDOW:
        lane = _next_lane(lanes)
        if lane is None:
            break
        entry = look(s, lane.ids[lane.next][0], False)
        lane.next += 1
        lane.position += entry.price
        found.append(entry)
    return found


def estimate(s: Slot, band: int, tenant: str) -> tuple[int, int]:
    """(requests, blocks) before a newcomer, from sums instead of a walk: a tenant with P blocks waiting from counter c
    has the share (mine - c) / P of them before a newcomer at `mine`. Exact for one tenant, near for several."""
    own = s.ks.hnum(s.keys.account(tenant), f"wp:{band}")
    mine = virtual_counter(s, band, tenant) + own
    requests = s.ks.zcard(s.keys.resume) + s.ks.zcard(s.keys.wait(band, tenant))
    blocks = own
    for above in range(band + 1):
        for other, counter in s.ks.zrange(s.keys.fair(above), limits.WINDOW):
            if above == band and other == tenant:
                continue
            total = max(1, s.ks.hnum(s.keys.account(other), f"wp:{above}"))
            before = total if above < band else min(total, max(0, mine - counter))
            blocks += before
            requests += s.ks.zcard(s.keys.wait(above, other)) * before // total
    return requests, blocks


def wait_ms(s: Slot, blocks: int) -> int:
    """Blocks ahead over the measured drain rate; 0 while none is known."""
    rate = s.ks.hnum(s.keys.meta, "rate")
    return blocks * 1_000_000 // rate if rate > 0 else 0
