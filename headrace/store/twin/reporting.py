"""`report`: one frame or beat of one worker; and `release`, which hands work back."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.store.interface import LEASE_MS
from headrace.store.keys import name_of
from headrace.store.limits import HAND_BACKS
from headrace.store.parts import pack_logprobs, pack_part, unpack_logprobs
from headrace.store.twin.binding import (
    claim_all,
    claim_for,
    end_request,
    has_room_elsewhere,
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


@dataclass(frozen=True)
class ReportCall:
    """The argument list of `report`, by position. Parts stand in columns, so that the server unpacks few tables."""

    worker: str
    seq: int
    last_inbox_id: str
    credit_blocks: int
    free_slots: int
    draining: int
    total_blocks: int
    block_size: int
    max_context: int
    load: bytes
    ids: list[str]
    choices: list[int]
    epochs: list[int]
    firsts: list[int]
    tokens: list[bytes]
    packed: bytes
    """The parts as the delivery stream carries them, joined."""
    sizes: list[int]
    """Bytes of each in `packed`."""
    ends: list[tuple[int, str, str]]
    """(column, finish, detail) of the parts that finish."""
    scored: list[int]
    """Columns of the parts that tell log probabilities."""
    runs: list[bytes]
    """Of each of these: its records as the delivery stream carries them."""
    prompts: list[tuple[int, bytes]]
    """(column, records) of the parts that tell the prompt's."""

    def packed_part(self, column: int) -> bytes:
        start = sum(self.sizes[:column])
        return self.packed[start : start + self.sizes[column]]

    def header(self) -> BoardHeader:
        return BoardHeader(
            self.seq,
            self.last_inbox_id,
            self.credit_blocks,
            self.free_slots,
            self.draining,
            0,
            self.total_blocks,
            self.block_size,
            self.max_context,
        )


@dataclass
class Taken:
    """What became of a frame's parts."""

    resend: list[Reply] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    outgoing: dict[str, list[bytes]] = field(default_factory=dict)
    logprobs: dict[str, list[bytes]] = field(default_factory=dict)

    def drop(self, request_id: str) -> None:
        if request_id not in self.dropped:
            self.dropped.append(request_id)


def report(s: Slot, *argument: object) -> Reply:
    call = ReportCall(*argument)  # type: ignore[arg-type]
    worker = call.worker
    if is_fenced(s, WORKER, worker):
        return [1, [], [], 0, s.now]
    requeued = _renew(s, worker)
    _update_board(s, worker, call.header(), call.load)
    taken = _take_parts(s, call)
    for owner, outgoing in taken.outgoing.items():
        tell_router(s, owner, worker, call.seq, outgoing, taken.logprobs.get(owner))
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


def _take_parts(s: Slot, call: ReportCall) -> Taken:
    """Fencing is one look at `held`: its value must begin with the part's epoch."""
    taken = Taken()
    held = {request_id: s.ks.hget(s.keys.held(call.worker), request_id) for request_id in call.ids}
    ends = {column: (finish, detail) for column, finish, detail in call.ends}
    runs, prompts = dict(zip(call.scored, call.runs, strict=True)), dict(call.prompts)
    for column, request_id in enumerate(call.ids):
        choice, epoch = call.choices[column], f"{call.epochs[column]}:"
        finish, detail = ends.get(column, ("", ""))
        value = held[request_id]
        if value is None or not value.startswith(epoch):
            taken.drop(request_id)
            continue
        mark, _, owner = value[len(epoch) :].partition(":")
        at, fresh = _append(s, s.keys.journal(request_id, choice), call.firsts[column], call.tokens[column])
        if fresh is None:
            taken.resend.append([request_id, choice, at])
            continue
        if column in runs:
            _tell_logprobs(s, runs[column], at, taken.logprobs.setdefault(owner, []))
        if column in prompts and fresh and not s.ks.exists(s.keys.prompt_logprobs(request_id)):
            s.ks.append(s.keys.prompt_logprobs(request_id), prompts[column])
        newly, ended = _finish(s, request_id, choice, finish, detail) if finish else (False, False)
        if fresh or newly:
            is_whole = len(fresh) == len(call.tokens[column]) and at == call.firsts[column] and newly == bool(finish)
            told = (
                call.packed_part(column)
                if is_whole
                else pack_part(request_id, choice, at, fresh, finish * newly, detail)
            )
            taken.outgoing.setdefault(owner, []).append(told)
        if mark and not finish:
            # The cancel was marked before this frame: it has had its one further iteration.
            taken.outgoing.setdefault(owner, []).extend(end_request(s, request_id, "cancelled", "cancelled", ""))
            taken.drop(request_id)
            ended = True
        if ended:
            held[request_id] = None
    return taken


def _append(s: Slot, key: str, first: int, tokens: bytes) -> tuple[int, bytes | None]:
    """Appends what the journal lacks: (index, tokens appended); (its length, None) when it is shorter than `first`."""
    length = s.ks.strlen(key) // 4
    if first > length:
        return length, None
    fresh = tokens[(length - first) * 4 :]
    if fresh:
        s.ks.append(key, fresh)
    return length, fresh


def _tell_logprobs(s: Slot, run: bytes, index: int, told: list[bytes]) -> None:
    """Journals those of the tokens that were just appended at `index`, and passes them on beside the part.

    A hole before them (tokens of a worker that tells none) is filled with zeros: rank 0 says that there are none.
    """
    request_id, choice, first, record_bytes, records = next(unpack_logprobs(run))
    fresh = records[(index - first) * record_bytes :]
    if fresh:
        s.ks.set_range(s.keys.logprobs(request_id, choice), index * record_bytes, fresh)
        told.append(run if index == first else pack_logprobs(request_id, choice, index, record_bytes, fresh))


def _finish(s: Slot, request_id: str, choice: int, finish: str, detail: str) -> tuple[bool, bool]:
    """Records a choice's finish: (newly, it was the request's last)."""
    record = s.keys.request(request_id)
    if not s.ks.hsetnx(record, f"f{choice}", finish):
        return False, False
    if detail:
        s.ks.hset(record, {"detail": detail})
    if s.ks.hincrby(record, "left", -1) > 0:
        return True, False
    reasons = [s.ks.hget(record, f"f{index}") for index in range(s.ks.hnum(record, "n"))]
    state = "finished"
    if "failed" in reasons:
        state = "failed"
    elif "cancelled" in reasons or "deadline" in reasons:
        state = "cancelled"
    end_request(s, request_id, state, finish, s.ks.hget(record, "detail") or "")
    return True, True


def release(s: Slot, *argument: object) -> Reply:
    """Back to the queue at its rank, for other workers; only its holder of this epoch may. With a fourth argument of
    1, only while another worker has room for it, and at most HAND_BACKS times."""
    worker, request_id, epoch = str(argument[0]), str(argument[1]), argument[2]
    value = s.ks.hget(s.keys.held(worker), request_id)
    if value is None or not value.startswith(f"{epoch}:"):
        return [0]
    if argument[3] == 1:
        record = s.keys.request(request_id)
        if s.ks.hnum(record, "backs") >= HAND_BACKS or not has_room_elsewhere(s, request_id, worker):
            return [0]
        s.ks.hincrby(record, "backs", 1)
    requeue(s, request_id, worker)
    claim_all(s, [], worker)
    return [1]
