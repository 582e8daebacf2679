"""Functions that write nothing: the board, one request, what a bind needs, and the count of what there is."""

from __future__ import annotations

from headrace.store.twin.slot import ROUTER, TERMINAL, WORKER, Slot, board_row, credit_of, room_of

Reply = list[object]
SINGLES = ("board", "lease", "fenced", "lost", "open", "queue", "resume", "due", "meta")


def board(s: Slot) -> Reply:
    rows: list[object] = []
    for worker in s.ks.hkeys(s.keys.board):
        row = board_row(s, worker)
        if row is not None:
            left = max(0, (s.ks.zscore(s.keys.lease, WORKER + worker) or 0) - s.now)
            rows.append([worker, row[1], row[0].last_inbox_id, credit_of(room_of(s, worker)), left])
    return rows


def status(s: Slot, request_id: str) -> Reply:
    record = s.keys.request(request_id)
    if s.ks.hget(record, "state") is None:
        return []
    choices = range(s.ks.hnum(record, "n"))
    texts = [s.ks.hget(record, name) or "" for name in ("state", "tenant", "holder", "owner", "detail")]
    lengths = [s.ks.strlen(s.keys.journal(request_id, choice)) // 4 for choice in choices]
    finishes = [s.ks.hget(record, f"f{choice}") or "" for choice in choices]
    return [*texts, s.ks.hnum(record, "epoch"), s.ks.hnum(record, "oepoch"), lengths, finishes]


def fetch(s: Slot, worker: str, wanted: list[tuple[str, int]]) -> Reply:
    """Per (id, epoch), while this worker holds it at this epoch, else nothing: record, owner, journals and whether the
    prompt's log probabilities are journaled."""
    found: list[object] = []
    for request_id, epoch in wanted:
        record = s.keys.request(request_id)
        if s.ks.hget(record, "holder") != worker or s.ks.hnum(record, "epoch") != epoch:
            found.append([])
            continue
        journals = [s.ks.get(s.keys.journal(request_id, choice)) for choice in range(s.ks.hnum(record, "n"))]
        prompt_is_scored = int(s.ks.exists(s.keys.prompt_logprobs(request_id)))
        found.append([s.ks.hget_bytes(record, "body"), s.ks.hget(record, "owner"), journals, prompt_is_scored])
    return found


def census(s: Slot) -> Reply:
    """[waiting, waiting tokens, bound, workers, routers]"""
    members = [member for member, _ in s.ks.zrange(s.keys.lease)]
    lost = [member for member in s.ks.smembers(s.keys.lost) if member.startswith(WORKER)]
    workers = [member for member in members if member.startswith(WORKER)]
    bound = sum(s.ks.hlen(s.keys.held(member[2:])) for member in workers + lost)
    waiting = s.ks.zcard(s.keys.queue)
    return [waiting, s.ks.hnum(s.keys.meta, "waiting_tokens"), bound, len(workers), len(members) - len(workers)]


def inspect(s: Slot, names: list[str]) -> Reply:
    """[ended records, stray keys] among the keys named (the prefix taken off)."""
    ended = stray = 0
    for name in names:
        kind, _, rest = name.partition(":")
        if kind == "req" and _is_ended(s, rest):
            ended += 1
        elif not _belongs(s, kind, rest, name):
            stray += 1
    return [ended, stray]


def _is_ended(s: Slot, request_id: str) -> bool:
    state = s.ks.hget(s.keys.request(request_id), "state")
    return state in TERMINAL and s.ks.zscore(s.keys.due, request_id) is not None


def _belongs(s: Slot, kind: str, rest: str, name: str) -> bool:
    if kind == "req":
        holder = s.ks.hget(s.keys.request(rest), "holder") or ""
        waits = s.ks.zscore(s.keys.queue, rest) is not None
        return waits or s.ks.hget(s.keys.held(holder), rest) is not None
    if kind in ("tok", "lp", "plp"):
        return s.ks.exists(s.keys.request(rest if kind == "plp" else rest.rpartition(":")[0]))
    if kind == "idem":
        return s.ks.exists(s.keys.request(s.ks.get(s.keys.prefix + name).decode()))
    if kind == "wait":
        band, _, tenant = rest.partition(":")
        return s.ks.zscore(s.keys.fair(int(band)), tenant) is not None
    if kind == "acct":
        return s.ks.hnum(s.keys.account(rest), "n") > 0
    if kind in ("held", "inbox"):
        return _is_known(s, WORKER + rest)
    if kind in ("own", "out"):
        return _is_known(s, ROUTER + rest)
    return kind == "fair" or name in SINGLES


def _is_known(s: Slot, member: str) -> bool:
    return s.ks.zscore(s.keys.lease, member) is not None or member in s.ks.smembers(s.keys.lost)
