"""The store's contract: one call per state change, each atomic, bounded and safe to repeat (DESIGN section 5).

Three parts implement it: the Lua functions run by Redis, their pure-Python twin, and the Redis adapter that carries
arguments and replies between them. All times are milliseconds of the store's own clock; durations in arguments
are relative to it.
A *worker* or *router* argument is an incarnation `<name>~<nonce>`: one life of one process.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from headrace.frame import Frame, LoadReport
from headrace.logprobs import TokenLogprob
from headrace.request import BoundRequest, Request

LEASE_MS = 3_000
"""A worker's or router's right to go on after its last call."""


class State(StrEnum):
    """Life of a request in the store. `finished`, `failed`, `cancelled` are terminal."""

    QUEUED = "queued"
    BOUND = "bound"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Refusal(StrEnum):
    """Why `admit` wrote nothing."""

    TENANT_CAP = "tenant_cap"
    GLOBAL_CAP = "global_cap"
    TOO_LARGE = "too_large"
    NO_CAPACITY_KNOWN = "no_capacity_known"
    DEADLINE = "deadline"
    WRONG_MODEL = "wrong_model"
    STORE_FULL = "store_full"


@dataclass(frozen=True)
class Admit:
    request: Request
    router: str
    """The caller, who becomes the owner."""
    candidates: tuple[str, ...]
    """Worker incarnations, best first, as `choose` ranked them; the first with credit in the store is bound."""
    price_blocks: int
    """Uncached prompt blocks + expected output blocks."""
    overlap_blocks: tuple[tuple[str, int], ...] = ()
    """Worker → prompt blocks it has cached; a claim prefers the best overlap."""
    deadline_ms: int | None = None
    """From now; the request is ended when it passes, wherever it is."""
    resume_grace_ms: int = 0
    background: bool = False
    result_ttl_ms: int = 60_000
    idempotency_key: str | None = None
    tenant_cap_tokens: int = 0
    """0 = none; caps count prompt + max_tokens of everything the tenant has waiting or running."""
    global_cap_tokens: int = 0


@dataclass(frozen=True)
class Admitted:
    """`worker` is "" while queued. An earlier request under the same idempotency key, or the same request asked again,
    comes back as it is with `existing` true and nothing written."""

    request_id: str
    state: State
    worker: str
    epoch: int
    existing: bool
    queue_position: int
    """Requests before it in fair order; 0 when bound."""
    eta_ms: int
    """Predicted wait from the position and the measured drain rate; 0 when bound or unknown."""
    now_ms: int


@dataclass(frozen=True)
class Refused:
    reason: Refusal
    limit: int
    """The bound that was hit, in the unit of the reason (tokens, or ms for `deadline`)."""
    asked: int
    retry_after_ms: int
    """0 where waiting does not help (`too_large`, `wrong_model`)."""


@dataclass(frozen=True)
class Reported:
    """What the store says to a frame or beat.

    `fenced`: the incarnation lost its lease or was replaced: nothing was taken; it must empty itself and rejoin as a
    new one. `resend`: parts whose `first_index` lies beyond the journal: send again from the index given. `dropped`:
    requests in the frame that are not this worker's (ended, cancelled, re-bound): forget them. `claimed`: how many
    inbox entries the call added for this worker (they are read from the inbox; the reply is only a hint).
    """

    fenced: bool
    resend: tuple[tuple[str, int, int], ...]
    """(request id, choice, index to send from)"""
    dropped: tuple[str, ...]
    claimed: int
    now_ms: int


@dataclass(frozen=True)
class Attached:
    """`worker` is "" while queued or ended. Ended requests may still be read until their TTL."""

    request_id: str
    state: State
    worker: str
    epoch: int
    owner_epoch: int
    now_ms: int


@dataclass(frozen=True)
class Swept:
    """What one sweep did. `fenced`: the router itself was fenced; it rejoins under a new incarnation."""

    fenced: bool
    workers_lost: tuple[str, ...]
    routers_lost: tuple[str, ...]
    requeued: tuple[str, ...]
    ended: tuple[str, ...]
    """Requests it ended: deadline passed, grace over, cancelled."""
    quiet: bool
    """True for one lease after the store was away: nobody's lease lapses and nothing is claimed."""
    now_ms: int


@dataclass(frozen=True)
class InboxEntry:
    """`kind` is `bind`, `cancel`, `owner` or `drain`. `bound` comes with `bind` while the request is still this
    worker's at that epoch (the adapter has read record and journal), else None: the entry only counts as seen."""

    id: str
    kind: str
    request_id: str
    price_blocks: int
    epoch: int
    owner: str
    bound: BoundRequest | None = None
    damaged: str = ""
    """Why the record cannot be read (it is another release's, or damaged): the request can only be ended."""


@dataclass(frozen=True)
class DeliveryPart:
    """The delivery stream's copy of one part. `finish` is a FinishReason value or ""."""

    request_id: str
    choice: int
    first_index: int
    token_ids: tuple[int, ...]
    finish: str
    detail: str
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of `token_ids`, or none: they were not asked for, or its worker does not tell them."""


@dataclass(frozen=True)
class DeliveryEntry:
    id: str
    worker: str
    seq: int
    parts: tuple[DeliveryPart, ...]


@dataclass(frozen=True)
class RequestStatus:
    """A request's record without its prompt, and its journal's lengths. `finishes` is per choice, "" while running."""

    request_id: str
    state: State
    tenant: str
    worker: str
    epoch: int
    owner: str
    owner_epoch: int
    journal_lengths: tuple[int, ...]
    finishes: tuple[str, ...]
    detail: str


@dataclass(frozen=True)
class BoardRow:
    """One worker on the board. `credit_blocks` is credit as DESIGN defines it: the report's, less the price of inbox
    entries after `last_inbox_id`, and 0 without free slots, when draining or without a live lease."""

    worker: str
    load: LoadReport
    last_inbox_id: str
    credit_blocks: int
    lease_left_ms: int


@dataclass(frozen=True)
class Census:
    """Counts that the store keeps anyway: cheap however much it holds, so metrics may ask at any time."""

    waiting: int
    waiting_tokens: int
    bound: int
    workers: int
    routers: int


@dataclass(frozen=True)
class Audit:
    """What only a walk over the slot's keys tells: for `headrace status` and the tests' idle check."""

    ended: int
    """Records that only wait for their TTL."""
    stray_keys: int
    """Keys of the slot that belong to nothing that is; 0 unless something leaked."""


class Store(Protocol):
    """Asynchronous for the router, synchronous (`SyncStore`) for the worker's link; the same calls in both."""

    async def admit(self, call: Admit) -> Admitted | Refused: ...
    async def cancel(self, request_id: str, *, owner_epoch: int | None = None) -> State | None:
        """Marks, tells the holder, ends it if it waits. None: unknown. With `owner_epoch` it is a disconnect, which has
        the request's grace; one of a stale epoch does nothing."""
        ...

    async def attach(self, request_id: str, router: str, tenant: str) -> Attached | None:
        """Makes `router` the owner under a new owner epoch, also when it was already. None: unknown, or not
        this tenant's."""
        ...

    async def end(self, request_id: str, state: State, detail: str) -> bool:
        """Ends one that never ran; False when it is unknown or already terminal."""
        ...

    async def drain(self, worker_name: str) -> bool: ...
    async def sweep(self, router: str) -> Swept: ...
    async def board(self) -> tuple[BoardRow, ...]: ...
    async def status(self, request_id: str) -> RequestStatus | None: ...
    async def journal(self, request_id: str, choice: int, from_index: int) -> tuple[int, ...]: ...
    async def logprobs(
        self, request_id: str, choice: int, from_index: int, count: int, tops: int
    ) -> tuple[TokenLogprob, ...]:
        """Of at most `count` journaled tokens, each with the `tops` likeliest ids that the request asks for. Fewer, or
        with rank 0, where a worker did not tell them."""
        ...

    async def prompt_logprobs(self, request_id: str, prompt_tokens: int) -> tuple[TokenLogprob, ...]:
        """Of all tokens of the prompt, which has `prompt_tokens`; () where none are told."""
        ...

    async def deliveries(self, router: str, after_id: str, block_ms: int) -> tuple[DeliveryEntry, ...]: ...
    async def owned(self, router: str) -> tuple[str, ...]:
        """The request ids this router delivers: the truth that reconciliation compares with."""
        ...

    async def census(self) -> Census: ...
    async def audit(self) -> Audit:
        """Looks at every key of the slot, page by page; exact when nothing else is going on."""
        ...

    async def leave(self, router: str) -> None:
        """Ends the router's lease at once (clean shutdown); its requests keep their grace."""
        ...

    async def close(self) -> None: ...


class SyncStore(Protocol):
    """What a worker's link calls from its own threads; every call has a socket timeout and raises `Unavailable`."""

    def report(self, worker: str, frame: Frame) -> Reported:
        """A frame without parts is the beat. The first call of a new incarnation joins it and fences older ones."""
        ...

    def inbox(self, worker: str, after_id: str, block_ms: int) -> tuple[InboxEntry, ...]: ...
    def release(self, worker: str, request_id: str, epoch: int, *, only_if_room_elsewhere: bool = False) -> bool:
        """Hands back unstarted (or drained) work to the queue at its rank; only its holder may. With
        `only_if_room_elsewhere` nothing happens (False) unless another worker would take it now, and after a few times
        nothing happens any more: it stays where it is."""
        ...

    def end(self, request_id: str, state: State, detail: str) -> bool:
        """As `Store.end`: for a request whose record no worker of this release can read."""
        ...

    def leave(self, worker: str) -> None:
        """Ends the worker's lease at once (clean shutdown); its requests are re-queued."""
        ...

    def close(self) -> None: ...
