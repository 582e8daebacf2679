"""Bringing one stream level with its journal: after a hole, a silence, a new incarnation or a store that was away."""

from __future__ import annotations

from typing import TypeVar

from headrace.errors import Moved, RequestFailed
from headrace.frame import FinishReason
from headrace.store.interface import RequestStatus, State, Store
from router.delivery import merging
from router.delivery.progress import ChoiceProgress
from router.delivery.stream import RequestStream

T = TypeVar("T")

MAX_ROUNDS = 64
"""A stream that is still behind after this many reads is left to the next reconciliation."""

_REASON_OF_STATE = {
    State.FINISHED: FinishReason.STOP,
    State.FAILED: FinishReason.FAILED,
    State.CANCELLED: FinishReason.CANCELLED,
}


async def catch_up(store: Store, router: str, stream: RequestStream) -> None:
    """Feeds `stream` from the journal until it has everything that was there when this began, its end included.

    Parts may be fed meanwhile from the delivery stream: indices make the two orders equal. Breaks the stream when the
    record is gone or another router owns it. Raises Unavailable when the store is away.
    """
    for _ in range(MAX_ROUNDS):
        stream.behind = False
        status = await store.status(stream.request_id)
        if stream.complete:
            return
        if status is None:
            stream.break_with(RequestFailed("the request's record is no longer in the store"))
            return
        if status.owner != router and not _ended(status):
            stream.break_with(Moved("another router delivers this request now; attach there"))
            return
        await _read_journals(store, stream, status)
        if not stream.behind:
            return


async def _read_journals(store: Store, stream: RequestStream, status: RequestStatus) -> None:
    if stream.scored_prompt:
        if _at(status.journal_lengths, 0, 0) == 0 and _finish(status, 0) is None:
            return
        stream.tell_prompt(await store.prompt_logprobs(stream.request_id, len(stream.scored_prompt)))
    for progress in stream.choices:
        if progress.finished:
            continue
        length = _at(status.journal_lengths, progress.choice, 0)
        if length > progress.next_index:
            await _read_journal(store, stream, progress)
        finish = _finish(status, progress.choice)
        if finish is not None and progress.next_index >= length:
            stream.feed(progress.choice, progress.next_index, (), finish, status.detail)


async def _read_journal(store: Store, stream: RequestStream, progress: ChoiceProgress) -> None:
    start = progress.next_index
    tokens = await store.journal(stream.request_id, progress.choice, start)
    if progress.tops is None:
        stream.feed(progress.choice, start, tokens, None, "")
        return
    # Log probabilities are read after their tokens, so that there are no fewer of them; in pieces, for they are large.
    for at in range(0, len(tokens), merging.MAX_SCORED_TOKENS):
        piece, first = tokens[at : at + merging.MAX_SCORED_TOKENS], start + at
        scores = await store.logprobs(stream.request_id, progress.choice, first, len(piece), progress.tops)
        stream.feed(progress.choice, first, piece, None, "", scores)


def _finish(status: RequestStatus, choice: int) -> FinishReason | None:
    """The choice's own finish, else what the end of the whole request means for it."""
    own = _at(status.finishes, choice, "")
    if own:
        return FinishReason(own)
    return _REASON_OF_STATE[status.state] if _ended(status) else None


def _ended(status: RequestStatus) -> bool:
    return status.state in _REASON_OF_STATE


def _at(values: tuple[T, ...], index: int, missing: T) -> T:
    return values[index] if index < len(values) else missing
