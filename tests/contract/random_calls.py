"""Random calls that mostly make sense: an observer of the twin's keys proposes what a live cluster could ask next."""

from __future__ import annotations

import random
from typing import Any

from headrace.codec import logprob_bytes
from headrace.store.calls import PartRow, part_columns
from headrace.store.keyspace import format_id
from headrace.store.twin import Twin

Call = tuple[str, list[Any]]
TENANTS = ("acme", "b:c", "zoë")


class RandomCalls:
    """Draws one call after another for one sequence; reads the twin only."""

    def __init__(self, seed: int, twin: Twin) -> None:
        self.random = random.Random(seed)
        self.twin = twin
        self.workers = ["w1~a", "w2~a", "w3~a"]
        self.routers = ["r1~a", "r2~a"]
        self.ids: list[str] = []
        self.seq: dict[str, int] = {}
        self.lives = 0
        self.now = 1_760_000_000_000
        self.run_id = "one"

    def tick(self) -> None:
        """Mostly milliseconds; sometimes a lease, a deadline, a step back or another life of the server."""
        roll = self.random.random()
        if roll < 0.80:
            self.now += self.random.randrange(0, 60)
        elif roll < 0.94:
            self.now += self.random.randrange(100, 1_500)
        elif roll < 0.97:
            self.now += self.random.randrange(3_000, 9_000)
        elif roll < 0.98:
            self.now -= self.random.randrange(1, 20)
        elif roll < 0.985:
            self.run_id = f"run{self.random.randrange(10**6)}"

    def draw(self) -> Call:
        kinds = {
            self.admit: 22, self.report: 40, self.sweep: 10, self.cancel: 5, self.attach: 4, self.release: 5,
            self.end: 2, self.drain: 1, self.leave: 1, self.renew_life: 2, self.read: 8,
        }  # fmt: skip
        return self.random.choices(list(kinds), list(kinds.values()))[0]()

    def admit(self) -> Call:
        r = self.random
        request_id = f"q{len(self.ids)}"
        asked = self._some_id()
        if r.random() < 0.05 and self.twin.keyspace.exists(self.twin.keys.request(asked)):
            request_id = asked
        else:
            self.ids.append(request_id)
        prompt, most, n = r.randrange(1, 300), r.randrange(1, 200), r.choice((1, 1, 1, 2, 3))
        if r.random() < 0.03:
            most = 5_000
        candidates = r.sample([*self.workers, "gone~x"], r.randrange(0, 4))
        return "admit", [
            r.choice(self.routers),
            request_id,
            r.randbytes(12),
            r.choice(TENANTS),
            r.choice((0, 0, 0, 1, 2)),
            n,
            r.randrange(1, 24),
            prompt + n * most,
            prompt + most,
            candidates,
            [[worker, r.randrange(0, 9)] for worker in candidates[:2]],
            r.choice((0, 0, 0, 40, 900, 5_000)),
            r.choice((0, 0, 700, 20_000)),
            int(r.random() < 0.1),
            r.choice((1, 500, 60_000)),
            r.choice(("", "", "", f"k{r.randrange(4)}")),
            r.choice((0, 0, 0, 600, 4_000)),
            r.choice((0, 0, 0, 9_000)),
        ]

    def report(self) -> Call:
        r = self.random
        worker = r.choice(self.workers)
        seq = self.seq[worker] = self.seq.get(worker, 0) + r.choice((1, 1, 1, 0, -1))
        entries = self.twin.keyspace.streams.get(self.twin.keys.inbox(worker))
        last = "0-0"
        if entries is not None and r.random() < 0.8:
            last = format_id(entries.last)
        context, pool = r.choice(((1_024, 128), (1_024, 128), (1_024, 128), (512, 64)))
        load = [r.randrange(0, 40), r.randrange(0, 9), int(r.random() < 0.03), pool, 16, context, r.randbytes(6)]
        return "report", [worker, max(0, seq), last, *load, *part_columns(self._parts(worker))]

    def _parts(self, worker: str) -> list[PartRow]:
        r = self.random
        parts: list[PartRow] = []
        for request_id in self.twin.keyspace.hkeys(self.twin.keys.held(worker)):
            if r.random() < 0.3:
                continue
            record = self.twin.keys.request(request_id)
            epoch, n = self.twin.keyspace.hnum(record, "epoch"), self.twin.keyspace.hnum(record, "n")
            for choice in range(n):
                length = self.twin.keyspace.strlen(self.twin.keys.journal(request_id, choice)) // 4
                first = max(0, length + r.choice((0,) * 8 + (-1, 1, -2)))
                tokens = r.randbytes(4 * r.choice((1, 1, 1, 0, 3)))
                finish = r.choice(("",) * 9 + ("stop", "length", "failed", "cancelled"))
                detail = "NaN" if finish == "failed" else ""
                stale = int(r.random() < 0.03)
                scores = self._scores(request_id, choice, len(tokens) // 4)
                parts.append((request_id, choice, epoch - stale, first, tokens, finish, detail, *scores))
        if r.random() < 0.05:
            parts.append((self._some_id(), 0, 0, 0, b"\1\0\0\0", "", "", r.randbytes(8), b""))
        return parts

    def _scores(self, request_id: str, choice: int, tokens: int) -> tuple[bytes, bytes]:
        """Every second request asks for log probabilities, always of one width; now and then a worker tells none."""
        asked = int(request_id[1:]) % 6
        if asked > 2 or self.random.random() < 0.1:
            return b"", b""
        size = logprob_bytes(asked)
        prompt = self.random.randbytes(3 * size) if choice == 0 and asked and self.random.random() < 0.6 else b""
        return self.random.randbytes(tokens * size), prompt

    def _some_id(self) -> str:
        return self.random.choice(self.ids[-12:]) if self.ids and self.random.random() < 0.95 else "nobody"

    def sweep(self) -> Call:
        return "sweep", [self.random.choice(self.routers)]

    def cancel(self) -> Call:
        return "cancel", [self._some_id(), self.random.choice((-1, 1, 1, 2))]

    def attach(self) -> Call:
        return "attach", [self._some_id(), self.random.choice(self.routers), self.random.choice(TENANTS)]

    def release(self) -> Call:
        worker = self.random.choice(self.workers)
        held = self.twin.keyspace.hkeys(self.twin.keys.held(worker)) or ["nobody"]
        request_id = self.random.choice(held)
        epoch = self.twin.keyspace.hnum(self.twin.keys.request(request_id), "epoch")
        only_if_room_elsewhere = self.random.randrange(2)
        return "release", [worker, request_id, epoch - int(self.random.random() < 0.1), only_if_room_elsewhere]

    def end(self) -> Call:
        state, reason = self.random.choice((("failed", "failed"), ("cancelled", "cancelled")))
        return "end", [self._some_id(), state, reason, "because"]

    def drain(self) -> Call:
        return "drain", [self.random.choice(("w1", "w2", "nobody"))]

    def leave(self) -> Call:
        if self.random.random() < 0.5:
            return "leave", ["w:", self.random.choice(self.workers)]
        return "leave", ["r:", self.random.choice(self.routers)]

    def renew_life(self) -> Call:
        """One process is replaced by a new incarnation of its name."""
        self.lives += 1
        members = self.random.choice((self.workers, self.workers, self.routers))
        at = self.random.randrange(len(members))
        members[at] = f"{members[at].partition('~')[0]}~{self.lives}"
        return self.report() if members is self.workers else self.sweep()

    def read(self) -> Call:
        worker = self.random.choice(self.workers)
        held = self.twin.keyspace.hkeys(self.twin.keys.held(worker))
        wanted = [[request_id, self.random.choice((1, 2))] for request_id in [*held, "nobody"]]
        names = [key.removeprefix(self.twin.keys.prefix) for key in self.twin.keyspace.names()]
        return self.random.choice(
            [
                ("board", []),
                ("status", [self._some_id()]),
                ("fetch", [worker, wanted]),
                ("census", []),
                ("inspect", [[*names, "tok:nobody:0", "lp:nobody:0", "plp:nobody", "odd", "held:nobody"]]),
            ]
        )
