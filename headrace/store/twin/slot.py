"""What every function of the twin works on: the keys of one slot, their values and one reading of the clock."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.store import limits
from headrace.store.keys import Keys, name_of
from headrace.store.keyspace import Fields, Keyspace

WORKER = "w:"
ROUTER = "r:"
TERMINAL = ("finished", "failed", "cancelled")


@dataclass(frozen=True)
class Slot:
    """One call's view. `now` is read once, as Redis' clock stands still inside a function."""

    ks: Keyspace
    keys: Keys
    now: int
    run_id: str


@dataclass(frozen=True)
class BoardHeader:
    """The plain fields in front of a load report on the board: all that the functions themselves read."""

    seq: int
    last_inbox_id: str
    credit_blocks: int
    free_slots: int
    draining: int
    ordered: int
    """1 once a drain was ordered; later reports keep it."""
    total_blocks: int
    block_size: int
    max_context: int

    @classmethod
    def parse(cls, row: bytes) -> BoardHeader:
        seq, last, credit, slots, draining, ordered, total, size, context = row.partition(b"|")[0].decode().split(" ")
        return cls(
            int(seq), last, int(credit), int(slots), int(draining), int(ordered), int(total), int(size), int(context)
        )

    def row(self, load: bytes) -> bytes:
        plain = (
            f"{self.seq} {self.last_inbox_id} {self.credit_blocks} {self.free_slots} {self.draining} {self.ordered} "
            f"{self.total_blocks} {self.block_size} {self.max_context}|"
        )
        return plain.encode() + load

    @property
    def has_room(self) -> bool:
        return self.credit_blocks > 0 and self.free_slots > 0 and not self.draining and not self.ordered


@dataclass
class Room:
    """What one worker would accept now; `claim` uses it up."""

    credit_blocks: int
    slots: int
    empty: bool
    """It holds nothing: then whatever fits its pool may start, so that neither a price estimate nor more choices than
    it has slots can wedge the queue (choices beyond the slots wait there)."""
    pool_tokens: int
    context_tokens: int

    def takes(self, price: int, need_tokens: int, span_tokens: int, choices: int) -> bool:
        """`need_tokens` and `price` are of all choices together, `span_tokens` of the longest."""
        if self.slots < 1 or need_tokens > self.pool_tokens or span_tokens > self.context_tokens:
            return False
        return self.empty or (choices <= self.slots and 0 < self.credit_blocks >= price)

    def take(self, price: int, choices: int) -> None:
        self.credit_blocks = max(0, self.credit_blocks - price)
        self.slots -= choices
        self.empty = False


NO_ROOM = Room(0, 0, False, 0, 0)


def is_live(s: Slot, member: str) -> bool:
    expiry = s.ks.zscore(s.keys.lease, member)
    return expiry is not None and expiry > s.now


def is_quiet(s: Slot) -> bool:
    """True for one lease after the store was away."""
    return s.ks.hnum(s.keys.meta, "quiet_until") > s.now


def board_row(s: Slot, worker: str) -> tuple[BoardHeader, bytes] | None:
    row = s.ks.hget_bytes(s.keys.board, worker)
    if row is None:
        return None
    return BoardHeader.parse(row), row.partition(b"|")[2]


def room_of(s: Slot, worker: str) -> Room:
    """Credit, derived: the report's, less the price of the binds that it has not counted."""
    row = board_row(s, worker)
    if row is None or not row[0].has_room or not is_live(s, WORKER + worker):
        return NO_ROOM
    header = row[0]
    unseen = [f for _, f in s.ks.xafter(s.keys.inbox(worker), header.last_inbox_id) if f["k"] == "bind"]
    return Room(
        credit_blocks=max(0, header.credit_blocks - sum(int(f["p"]) for f in unseen)),
        slots=max(0, header.free_slots - sum(int(f.get("n", "1")) for f in unseen)),
        empty=s.ks.hlen(s.keys.held(worker)) == 0,
        pool_tokens=header.total_blocks * header.block_size,
        context_tokens=header.max_context,
    )


def credit_of(room: Room) -> int:
    return room.credit_blocks if room.slots > 0 else 0


def write_board(s: Slot, worker: str, header: BoardHeader, load: bytes) -> None:
    s.ks.hset(s.keys.board, {worker: header.row(load)})
    if header.has_room:
        s.ks.sadd(s.keys.open, worker)
    else:
        s.ks.srem(s.keys.open, worker)


def record_capacity(s: Slot) -> None:
    """Keeps the distinct (context, pool) pairs of the board, in tokens; with nobody on it the last ones stay."""
    pairs = set()
    for worker in s.ks.hkeys(s.keys.board):
        row = board_row(s, worker)
        if row is not None:
            pairs.add((row[0].max_context, row[0].total_blocks * row[0].block_size))
    if pairs:
        s.ks.hset(s.keys.meta, {"capacity": ",".join(f"{context}:{pool}" for context, pool in sorted(pairs))})


def tell_worker(
    s: Slot, worker: str, kind: str, request_id: str, price: int, epoch: int, owner: str, choices: int = 1
) -> None:
    """One inbox entry; a worker without a lease has no inbox. Several choices are told: each takes a slot."""
    if s.ks.zscore(s.keys.lease, WORKER + worker) is not None:
        fields: Fields = {"k": kind, "i": request_id, "p": str(price), "e": str(epoch), "o": owner}
        if choices > 1:
            fields["n"] = str(choices)
        s.ks.xadd(s.keys.inbox(worker), s.now, fields)


def tell_router(
    s: Slot, router: str, worker: str, seq: int, parts: list[bytes], logprobs: list[bytes] | None = None
) -> None:
    """One entry per frame and owner; a router without a live lease has no stream."""
    if parts and s.ks.zscore(s.keys.lease, ROUTER + router) is not None:
        fields: Fields = {"w": worker, "s": str(seq), "p": b"".join(parts)}
        if logprobs:
            fields["l"] = b"".join(logprobs)
        s.ks.xadd(s.keys.out(router), s.now, fields, limits.OUT_LENGTH)


def incarnations(s: Slot, kind: str, name: str) -> list[str]:
    """Live or lapsing incarnations of a name."""
    members = [member for member, _ in s.ks.zrange(s.keys.lease)]
    return [m[len(kind) :] for m in members if m.startswith(kind) and name_of(m[len(kind) :]) == name]


def order_drain(s: Slot, worker: str) -> bool:
    """Marks the worker on the board; False when it stood there already or is unknown."""
    row = board_row(s, worker)
    if row is None or row[0].ordered:
        return False
    write_board(s, worker, replace(row[0], ordered=1), row[1])
    tell_worker(s, worker, "drain", "", 0, 0, "")
    return True
