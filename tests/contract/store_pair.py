"""Both protocols over one slot, of the twin or of a server, with a clock that the test moves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import redis
import redis.asyncio

from headrace.frame import FinishReason, Frame, LoadReport, Part
from headrace.request import Request
from headrace.sampling import SamplingParams
from headrace.store.adapter import AsyncRedisStore, SyncRedisStore
from headrace.store.functions import library
from headrace.store.interface import Admit, Admitted, DeliveryPart, InboxEntry, Refused, Reported, Store, SyncStore
from headrace.store.twin_store import SyncTwinStore, TwinStore
from tests.contract.servers import Server
from tests.contract.slots import CLUSTER, MODEL, TEST_CLOCK, RealSlot, TwinSlot

ROUTER, OTHER_ROUTER = "router~1", "other~1"
WORKER, OTHER_WORKER = "worker~1", "spare~1"

LOAD = LoadReport(
    seq=0, credit_blocks=100, free_slots=8, free_blocks=100, cached_blocks=0, held_blocks=0, total_blocks=128,
    block_size=16, max_context=1024, running=0, waiting=0, uncomputed_tokens=0, step_s=0.05, drain_tokens_per_s=100.0,
    iterations=1, prompt_tokens_total=0, output_tokens_total=0, preemptions_total=0, draining=False, model=MODEL,
    weight_version="v1", numerics="cpu",
)  # fmt: skip


@dataclass
class StorePair:
    """`router` and `link` are the two protocols; the rest is what tests do over and over."""

    router: Store
    link: SyncStore
    slot: TwinSlot | RealSlot
    now: int = 1_760_000_000_000
    run_id: str = "one"
    seq: int = 0

    def wait(self, ms: int) -> None:
        self.now += ms
        self.slot.set_clock(self.now, self.run_id)

    def restart(self) -> None:
        """Another life of the server."""
        self.run_id += "'"
        self.slot.set_clock(self.now, self.run_id)

    def report(self, worker: str, *parts: Part, credit: int = 100, slots: int = 8, seen: str = "") -> Reported:
        self.seq += 1
        load = replace(LOAD, seq=self.seq, credit_blocks=credit, free_slots=slots)
        return self.link.report(worker, Frame(load, parts, seen))

    async def admit(self, request_id: str, **settings: object) -> Admitted | Refused:
        return await self.router.admit(admission(request_id, **settings))

    async def bound(self, request_id: str, **settings: object) -> InboxEntry:
        """Admits to the worker, which has room, and reads its inbox."""
        admitted = await self.admit(request_id, **settings)
        assert isinstance(admitted, Admitted)
        assert admitted.worker == WORKER
        return self.link.inbox(WORKER, "0-0", 0)[-1]

    async def delivered(self, router: str = ROUTER) -> list[DeliveryPart]:
        return [part for entry in await self.router.deliveries(router, "0-0", 0) for part in entry.parts]


def admission(request_id: str, **settings: object) -> Admit:
    """One prompt of 20 tokens and at most 12 of output for the worker; any field of Admit or of Request by name."""
    sampling = SamplingParams(max_tokens=settings.pop("max_tokens", 12), seed=7)  # type: ignore[arg-type]
    own = {name: settings.pop(name) for name in ("tenant", "band", "n", "model") if name in settings}
    prompt = tuple(range(1, 1 + settings.pop("prompt", 20)))  # type: ignore[operator]
    request = Request(request_id, **{"model": MODEL, "prompt_token_ids": prompt, "sampling": sampling, **own})
    call = Admit(request=request, router=ROUTER, candidates=(WORKER,), price_blocks=2)
    return replace(call, **settings)  # type: ignore[arg-type]


def part(
    request_id: str, first: int, *tokens: int, epoch: int = 1, choice: int = 0, finish: FinishReason | None = None
) -> Part:
    return Part(request_id, choice, epoch, first, tokens, finish)


def twin_pair() -> StorePair:
    slot = TwinSlot()
    return StorePair(TwinStore(slot.twin), SyncTwinStore(slot.twin), slot)


def server_pair(server: Server) -> Iterator[StorePair]:
    clients = [server.client(), server.client()]
    functions = library(TEST_CLOCK)
    router = AsyncRedisStore(
        redis.asyncio.Redis(unix_socket_path=str(server.socket), protocol=2), CLUSTER, MODEL, functions
    )
    link = SyncRedisStore(clients[0], CLUSTER, MODEL, functions)
    yield StorePair(router, link, RealSlot(clients[1]))
    for client in clients:
        client.close()
