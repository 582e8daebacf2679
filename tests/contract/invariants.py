"""What must hold in every state of a slot, whatever was called: checked on the twin, which equals the server."""

from __future__ import annotations

from collections import Counter

from headrace.store.parts import unpack_logprobs, unpack_parts
from headrace.store.twin import Twin
from headrace.store.twin.slot import TERMINAL


def check(twin: Twin) -> None:
    records = _records(twin)
    _check_places(twin, records)
    _check_accounts(twin, records)
    _check_tokens(twin, records)
    names = [key.removeprefix(twin.keys.prefix) for key in twin.keyspace.names()]
    ended, stray = twin.call("inspect", [names])
    assert (ended, stray) == (sum(record["state"] in TERMINAL for record in records.values()), 0)
    for _worker, _load, _last, credit, left in twin.call("board", []):
        assert credit >= 0
        assert left >= 0


def _records(twin: Twin) -> dict[str, dict[str, str]]:
    prefix = twin.keys.request("")
    return {
        key.removeprefix(prefix): {n: v.decode("latin-1") if isinstance(v, bytes) else v for n, v in hashed.items()}
        for key, hashed in twin.keyspace.hashes.items()
        if key.startswith(prefix)
    }


def _check_places(twin: Twin, records: dict[str, dict[str, str]]) -> None:
    """A bound request is in exactly one held set, a waiting one in one queue, an ended one in none; each stands at its
    owner while that router lives."""
    ks, keys = twin.keyspace, twin.keys
    held = Counter(i for key in ks.hashes if key.startswith(keys.held("")) for i in ks.hashes[key])
    lanes = Counter(i for key in ks.zsets if key.startswith(keys.prefix + "wait:") for i in ks.zsets[key])
    lanes.update(list(ks.zsets.get(keys.resume, {})))
    queue = ks.zsets.get(keys.queue, {})
    owned = Counter(i for key in ks.zsets if key.startswith(keys.own("")) for i in ks.zsets[key])
    assert set(held) | set(queue) | set(owned) <= set(records)
    for request_id, record in records.items():
        state = record["state"]
        assert held[request_id] == int(state == "bound"), (request_id, state)
        assert lanes[request_id] == int(state == "queued") == int(request_id in queue), (request_id, state)
        if state == "bound":
            epoch, _mark, owner = ks.hashes[keys.held(record["holder"])][request_id].split(":", 2)  # type: ignore[arg-type]
            assert (epoch, owner) == (record["epoch"], record["owner"])
        if state in TERMINAL:
            assert owned[request_id] == 0
            assert ks.zscore(keys.due, request_id) is not None
        elif ks.zscore(keys.lease, "r:" + record["owner"]) is not None:
            assert owned[request_id] == 1
            assert ks.zscore(keys.own(record["owner"]), request_id) is not None


def _check_accounts(twin: Twin, records: dict[str, dict[str, str]]) -> None:
    """Counters equal the sums over the sets: they never drift."""
    live = [record for record in records.values() if record["state"] not in TERMINAL]
    tokens: Counter[str] = Counter()
    for record in live:
        tokens[record["tenant"]] += int(record["cost"])
    assert twin.keyspace.hnum(twin.keys.meta, "tokens") == tokens.total()
    waiting = sum(int(record["cost"]) for record in live if record["state"] == "queued")
    assert twin.keyspace.hnum(twin.keys.meta, "waiting_tokens") == waiting
    accounts = {key for key in twin.keyspace.hashes if key.startswith(twin.keys.account(""))}
    assert accounts == {twin.keys.account(tenant) for tenant in tokens}
    for tenant, held in tokens.items():
        assert twin.keyspace.hnum(twin.keys.account(tenant), "tokens") == held


def _check_tokens(twin: Twin, records: dict[str, dict[str, str]]) -> None:
    """Every part in a delivery stream stands in the journal at its index."""
    for key, stream in twin.keyspace.streams.items():
        if not key.startswith(twin.keys.out("")):
            continue
        for _, fields in stream.entries:
            for request_id, choice, first, tokens, _finish, _detail in unpack_parts(fields["p"]):
                if request_id in records:
                    journal = twin.keyspace.get(twin.keys.journal(request_id, choice))
                    assert journal[first * 4 : first * 4 + len(tokens)] == tokens
            for request_id, choice, first, size, told in unpack_logprobs(fields.get("l", b"")):
                if request_id in records:
                    journal = twin.keyspace.get(twin.keys.logprobs(request_id, choice))
                    assert journal[first * size : first * size + len(told)] == told
                    assert len(journal) <= twin.keyspace.strlen(twin.keys.journal(request_id, choice)) // 4 * size
