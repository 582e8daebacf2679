"""`report`: one frame or beat of one worker; and `release`, which hands work back."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.store.interface import LEASE_MS
from headrace.store.keys import name_of
from headrace.store.twin.binding import (
    claim_all,
    claim_for,
    end_request,
    is_fenced,
    join,
    move_lost,
    requeue,
)
from headrace.store.twin.slot import (
    WORKER,
    BoardHeader,
    Slot,
    board_row,
    incarnations,
    record_capacity,
    tell_router,
    write_board,
)

Reply = list[object]
PartArgument = tuple[str, int, int, int, bytes, str, str]


@dataclass
class Taken:
    """What became of a frame's parts."""

    resend: list[Reply] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    outgoing: dict[str, list[Reply]] = field(default_factory=dict)


def report(s: Slot, *argument: object) -> Reply:
    worker, seq, last_inbox_id, credit, slots, draining, total, size, context, load, parts = argument
    assert isinstance(worker, str)
    assert isinstance(seq, int)
    assert isinstance(load, bytes)
    assert isinstance(parts, list)
    if is_fenced(s, WORKER, worker):
        return [1, [], [], 0, s.now]
    requeued = _renew(s, worker)
    header = BoardHeader(
        seq, str(last_inbox_id), *(int(str(v)) for v in (credit, slots, draining, 0, total, size, context))
    )
    _update_board(s, worker, header, load)
    taken = _take_parts(s, worker, parts)
    for owner, outgoing in taken.outgoing.items():
        tell_router(s, owner, worker, seq, outgoing)
    claimed = claim_for(s, worker)
    if requeued:
        claim_all(s, [], worker)
    return [0, taken.resend, taken.dropped, claimed, s.now]


def _renew(s: Slot, worker: str) -> bool:
    """Renews the lease, or joins and fences older incarnations of the name; True when that put requests back."""
    if s.ks.zscore(s.keys.lease, WORKER + worker) is not None:
        s.ks.zadd(s.keys.lease, WORKER + worker, s.now + LEASE_MS)
        return False
    join(s, WORKER, worker, incarnations(s, WORKER, name_of(worker)))
    return bool(move_lost(s)[0])


def _update_board(s: Slot, worker: str, header: BoardHeader, load: bytes) -> None:
    row = board_row(s, worker)
    if row is None:
        write_board(s, worker, header, load)
        record_capacity(s)
        return
    before = row[0]
    if header.seq < before.seq:
        return
    header = BoardHeader(**{**vars(header), "ordered": before.ordered})
    write_board(s, worker, header, load)
    if header.last_inbox_id != before.last_inbox_id:
        s.ks.xtrim_through(s.keys.inbox(worker), header.last_inbox_id)
    if (header.total_blocks, header.block_size, header.max_context) != (
        before.total_blocks,
        before.block_size,
        before.max_context,
    ):
        record_capacity(s)


def _take_parts(s: Slot, worker: str, parts: list[PartArgument]) -> Taken:
    """Fencing is one look at `held`: its value must begin with the part's epoch."""
    taken = Taken()
    held = {part[0]: s.ks.hget(s.keys.held(worker), part[0]) for part in parts}
    for part in parts:
        request_id, epoch = part[0], f"{part[2]}:"
        value = held[request_id]
        if value is None or not value.startswith(epoch):
            if request_id not in taken.dropped:
                taken.dropped.append(request_id)
            continue
        mark, _, owner = value[len(epoch) :].partition(":")
        fresh = _append(s, part, taken)
        if fresh is None:
            continue
        ended = _finish(s, part, fresh)
        if fresh[4] or fresh[5]:
            taken.outgoing.setdefault(owner, []).append(fresh)
        if mark and not ended and not part[5]:
            # The cancel was marked before this frame: it has had its one further iteration.
            taken.outgoing.setdefault(owner, []).extend(end_request(s, request_id, "cancelled", "cancelled", ""))
            taken.dropped.append(request_id)
            ended = True
        if ended:
            held[request_id] = None
    return taken


def _append(s: Slot, part: PartArgument, taken: Taken) -> Reply | None:
    """Appends what the journal lacks; the part as the router should get it, or None when it must be sent again."""
    request_id, choice, epoch, first, tokens, finish, detail = part
    key = s.keys.journal(request_id, choice)
    length = s.ks.strlen(key) // 4
    if first > length:
        taken.resend.append([request_id, choice, length])
        return None
    fresh = tokens[(length - first) * 4 :]
    if fresh:
        s.ks.append(key, fresh)
        return [request_id, choice, epoch, length, fresh, finish, detail]
    return [request_id, choice, epoch, length, b"", finish, detail]


def _finish(s: Slot, part: PartArgument, fresh: Reply) -> bool:
    """Records a choice's finish; True when it was the request's last. A repeated finish is taken out of the part."""
    request_id, choice, _, _, _, finish, detail = part
    if not finish:
        return False
    record = s.keys.request(request_id)
    if not s.ks.hsetnx(record, f"f{choice}", finish):
        fresh[5] = ""
        return False
    if detail:
        s.ks.hset(record, {"detail": detail})
    if s.ks.hincrby(record, "left", -1) > 0:
        return False
    reasons = [s.ks.hget(record, f"f{index}") for index in range(s.ks.hnum(record, "n"))]
    state = "finished"
    if "failed" in reasons:
        state = "failed"
    elif "cancelled" in reasons or "deadline" in reasons:
        state = "cancelled"
    end_request(s, request_id, state, finish, s.ks.hget(record, "detail") or "")
    return True


def release(s: Slot, *argument: object) -> Reply:
    """Back to the queue at its rank, for other workers; only its holder of this epoch may."""
    worker, request_id, epoch = str(argument[0]), str(argument[1]), argument[2]
    value = s.ks.hget(s.keys.held(worker), request_id)
    if value is None or not value.startswith(f"{epoch}:"):
        return [0]
    requeue(s, request_id, worker)
    claim_all(s, [], worker)
    return [1]
