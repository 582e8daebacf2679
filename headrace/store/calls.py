"""Calls and replies as the functions have them (flat lists of text, bytes and whole numbers), to and from typed values.

Shared by the Redis adapter and the twin's stores, so whoever tests against the twin runs this code too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from headrace.codec import (
    TOKEN_BYTES,
    decode_logprobs,
    decode_request,
    decode_tokens,
    encode_logprobs,
    encode_request,
    encode_tokens,
    pack_load,
    tops_of,
    unpack_load,
)
from headrace.errors import HeadraceError, InvalidRequest, Unavailable
from headrace.frame import FinishReason, Frame, Part
from headrace.logprobs import TokenLogprob
from headrace.request import BoundRequest, Request
from headrace.store.interface import (
    Admit,
    Admitted,
    Attached,
    Audit,
    BoardRow,
    Census,
    DeliveryEntry,
    DeliveryPart,
    InboxEntry,
    Refusal,
    Refused,
    Reported,
    RequestStatus,
    State,
    Swept,
)
from headrace.store.limits import BANDS, RETRY_MS
from headrace.store.parts import pack_logprobs, pack_part, short, unpack_logprobs, unpack_parts

Arguments = list[Any]
Reply = Sequence[Any]

END_REASONS = {
    State.FINISHED: FinishReason.STOP,
    State.FAILED: FinishReason.FAILED,
    State.CANCELLED: FinishReason.CANCELLED,
}


def text(value: Any) -> str:
    """Redis replies with bytes, the twin with text."""
    return value.decode() if isinstance(value, bytes) else str(value)


def raw(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def refuse_other_model(model: str, call: Admit) -> Refused | None:
    """A slot holds one model; a request for another one came to the wrong store."""
    return None if call.request.model == model else Refused(Refusal.WRONG_MODEL, 0, 0, 0)


def admit_arguments(call: Admit) -> Arguments:
    """Raises InvalidRequest for a band that the functions do not know."""
    request = call.request
    if not 0 <= request.band < BANDS:
        raise InvalidRequest(f"priority must be from 0 to {BANDS - 1}, not {request.band}", field="priority")
    most = request.sampling.max_tokens or 0
    prompt = len(request.prompt_token_ids)
    return [
        call.router,
        request.id,
        encode_request(request),
        request.tenant,
        request.band,
        request.n,
        call.price_blocks,
        _cost(request),
        prompt + most,
        list(call.candidates),
        [[worker, blocks] for worker, blocks in call.overlap_blocks],
        0 if call.deadline_ms is None else max(1, call.deadline_ms),
        call.resume_grace_ms,
        int(call.background),
        call.result_ttl_ms,
        call.idempotency_key or "",
        call.tenant_cap_tokens,
        call.global_cap_tokens,
    ]


def refuse_full(call: Admit) -> Refused:
    """What a call is told while the server has no memory for it."""
    return Refused(Refusal.STORE_FULL, limit=0, asked=_cost(call.request), retry_after_ms=RETRY_MS)


def _cost(request: Request) -> int:
    """Tokens that it may come to hold: the prompt once, which its choices share, and an output each."""
    return len(request.prompt_token_ids) + request.n * (request.sampling.max_tokens or 0)


def admit_reply(reply: Reply) -> Admitted | Refused:
    if reply[0] == 0:
        return Refused(Refusal(text(reply[1])), *reply[2:5])
    refuse_fenced(reply)
    _, request_id, state, worker, epoch, existing, position, eta, now = reply
    return Admitted(text(request_id), State(text(state)), text(worker), epoch, bool(existing), position, eta, now)


def refuse_fenced(reply: Reply) -> None:
    """Raises Unavailable when the calling router was fenced: it must rejoin as a new incarnation first."""
    if len(reply) == 1 and reply[0] == 2:
        raise Unavailable("this router lost its lease and is rejoining", retry_after_s=1.0)


def report_arguments(worker: str, frame: Frame) -> Arguments:
    load = frame.load
    return [
        worker,
        load.seq,
        frame.last_inbox_id or "0-0",
        max(0, load.credit_blocks),
        max(0, load.free_slots),
        int(load.draining),
        load.total_blocks,
        load.block_size,
        load.max_context,
        pack_load(load),
        *part_columns([as_row(part) for part in frame.parts]),
    ]


PartRow = tuple[str, int, int, int, bytes, str, str, bytes, bytes]
"""id, choice, epoch, first token index, packed tokens, finish or "", detail; then records of log probabilities, each
b"" where none are told: one per token, and of the prompt"""


def as_row(part: Part) -> PartRow:
    """Log probabilities that are not one for each token are left out: nobody could say whose they are."""
    scores = prompt_scores = b""
    if part.logprobs and len(part.logprobs) == len(part.token_ids):
        scores = encode_logprobs(part.logprobs)
    if part.prompt_logprobs:
        prompt_scores = encode_logprobs(part.prompt_logprobs)
    return (
        part.request_id,
        part.choice,
        part.epoch,
        part.first_index,
        encode_tokens(part.token_ids),
        "" if part.finish is None else part.finish.value,
        short(part.detail),
        scores,
        prompt_scores,
    )


def part_columns(rows: Sequence[PartRow]) -> Arguments:
    """The last eleven arguments of `report`: see `ReportCall`."""
    packed = [pack_part(row[0], row[1], row[3], row[4], row[5], row[6]) for row in rows]
    scored = [column for column, row in enumerate(rows) if row[7]]
    return [
        [row[0] for row in rows],
        [row[1] for row in rows],
        [row[2] for row in rows],
        [row[3] for row in rows],
        [row[4] for row in rows],
        b"".join(packed),
        [len(one) for one in packed],
        [[column, row[5], row[6]] for column, row in enumerate(rows) if row[5]],
        scored,
        [_run_of(rows[column]) for column in scored],
        [[column, row[8]] for column, row in enumerate(rows) if row[8]],
    ]


def _run_of(row: PartRow) -> bytes:
    record_bytes = len(row[7]) // (len(row[4]) // TOKEN_BYTES)
    return pack_logprobs(row[0], row[1], row[3], record_bytes, row[7])


def report_reply(reply: Reply) -> Reported:
    fenced, resend, dropped, claimed, now = reply
    return Reported(
        fenced=bool(fenced),
        resend=tuple((text(request_id), choice, index) for request_id, choice, index in resend),
        dropped=tuple(text(request_id) for request_id in dropped),
        claimed=claimed,
        now_ms=now,
    )


def cancel_reply(reply: Reply) -> State | None:
    return State(text(reply[0])) if reply else None


def attach_reply(reply: Reply) -> Attached | None:
    if not reply:
        return None
    refuse_fenced(reply)
    request_id, state, worker, epoch, owner_epoch, now = reply
    return Attached(text(request_id), State(text(state)), text(worker), epoch, owner_epoch, now)


def end_arguments(request_id: str, state: State, detail: str) -> Arguments:
    """Raises ValueError for a state that is no end."""
    if state not in END_REASONS:
        raise ValueError(f"{state} is no end")
    return [request_id, state.value, END_REASONS[state].value, short(detail)]


def sweep_reply(reply: Reply) -> Swept:
    fenced, workers, routers, requeued, ended, quiet, now = reply
    return Swept(
        fenced=bool(fenced),
        workers_lost=_texts(workers),
        routers_lost=_texts(routers),
        requeued=_texts(requeued),
        ended=_texts(ended),
        quiet=bool(quiet),
        now_ms=now,
    )


def _texts(values: Reply) -> tuple[str, ...]:
    return tuple(text(value) for value in values)


def board_reply(reply: Reply) -> tuple[BoardRow, ...]:
    return tuple(
        BoardRow(text(worker), unpack_load(load), text(last), credit, left)
        for worker, load, last, credit, left in reply
    )


def status_reply(request_id: str, reply: Reply) -> RequestStatus | None:
    if not reply:
        return None
    state, tenant, worker, owner, detail, epoch, owner_epoch, lengths, finishes = reply
    return RequestStatus(
        request_id=request_id,
        state=State(text(state)),
        tenant=text(tenant),
        worker=text(worker),
        epoch=epoch,
        owner=text(owner),
        owner_epoch=owner_epoch,
        journal_lengths=tuple(lengths),
        finishes=tuple(text(finish) for finish in finishes),
        detail=text(detail),
    )


def inbox_entry(entry_id: str, fields: dict[str, Any]) -> InboxEntry:
    return InboxEntry(
        id=entry_id,
        kind=text(fields["k"]),
        request_id=text(fields["i"]),
        price_blocks=int(text(fields["p"])),
        epoch=int(text(fields["e"])),
        owner=text(fields["o"]),
    )


def bound_request(entry: InboxEntry, fetched: Reply) -> BoundRequest | None:
    """What `fetch` found for one bind; None when the request is no longer this worker's at that epoch."""
    if not fetched:
        return None
    body, owner, journals, prompt_is_scored = fetched
    return BoundRequest(
        request=decode_request(body),
        epoch=entry.epoch,
        owner=text(owner),
        inbox_id=entry.id,
        journal=tuple(decode_tokens(journal) for journal in journals),
        prompt_is_scored=bool(prompt_is_scored),
    )


def with_bound(entries: Sequence[InboxEntry], fetched: Reply) -> tuple[InboxEntry, ...]:
    """The entries, each bind with its request; `fetched` has one reply per bind, in order."""
    found = iter(fetched)
    return tuple(_with_request(entry, next(found)) if entry.kind == "bind" else entry for entry in entries)


def _with_request(entry: InboxEntry, fetched: Reply) -> InboxEntry:
    try:
        return replace(entry, bound=bound_request(entry, fetched))
    except (HeadraceError, ValueError) as fault:  # one bad record must not stop the inbox of all
        return replace(entry, damaged=f"its record cannot be read: {fault}")


def delivery_entry(entry_id: str, fields: dict[str, Any]) -> DeliveryEntry:
    """`fields` as `tell_router` writes them: w(orker), s(eq), p(arts) and, where some are told, l(og probabilities)."""
    runs = _runs_of(raw(fields["l"])) if "l" in fields else {}
    return DeliveryEntry(
        id=entry_id,
        worker=text(fields["w"]),
        seq=int(text(fields["s"])),
        parts=tuple(
            DeliveryPart(
                request_id,
                choice,
                first,
                decode_tokens(tokens),
                finish,
                detail,
                runs.get((request_id, choice, first), ()) if runs and tokens else (),
            )
            for request_id, choice, first, tokens, finish, detail in unpack_parts(raw(fields["p"]))
        ),
    )


def _runs_of(packed: bytes) -> dict[tuple[str, int, int], tuple[TokenLogprob, ...]]:
    """(id, choice, first token index) → log probabilities."""
    return {
        (request_id, choice, first): decode_logprobs(records, tops_of(record_bytes))
        for request_id, choice, first, record_bytes, records in unpack_logprobs(packed)
    }


def prompt_logprobs_of(packed: bytes, prompt_tokens: int) -> tuple[TokenLogprob, ...]:
    """() where they are not told, or not of this prompt."""
    if not packed or len(packed) % prompt_tokens:
        return ()
    return decode_logprobs(packed, tops_of(len(packed) // prompt_tokens))


def census_reply(reply: Reply) -> Census:
    return Census(*reply)


def audit_of(pages: Iterable[Reply]) -> Audit:
    """Sums what `inspect` said of each page of keys."""
    pages = list(pages)
    return Audit(ended=sum(page[0] for page in pages), stray_keys=sum(page[1] for page in pages))
