"""From a call and its prompt's ids to a request that some worker can run, or a refusal that names the field.

One policy for every protocol. An explicit `max_tokens` that does not fit the context or the largest pool is refused
with both numbers; a missing one becomes what fits. A prompt that fills the whole context has no room for a token and is
refused. Everything here is a function of plain values.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from headrace.errors import InvalidRequest, TooLong, UnknownModel
from headrace.request import Request
from headrace.sampling import MAX_CHOICES, SamplingParams
from headrace.store.interface import BoardRow
from headrace.store.limits import BANDS
from router.admission.call import Call


@dataclass(frozen=True)
class ModelLimits:
    """What the model itself allows."""

    name: str
    vocab_size: int
    max_context: int


@dataclass(frozen=True)
class Capacity:
    """The most that any one worker could ever hold, and the block it counts in."""

    max_context: int
    pool_tokens: int
    block_size: int


def capacity_of(board: Iterable[BoardRow], model: str) -> Capacity | None:
    """The largest context and pool among this model's live workers; None when there is none.

    They are taken from one worker, the one that can hold the longest request: two workers' best halves are no worker.
    """
    best: Capacity | None = None
    for row in board:
        if row.lease_left_ms <= 0 or row.load.model != model:
            continue
        load = row.load
        this = Capacity(load.max_context, load.total_blocks * load.block_size, load.block_size)
        if best is None or _longest(this) > _longest(best):
            best = this
    return best


def _longest(capacity: Capacity) -> int:
    return min(capacity.max_context, capacity.pool_tokens)


def check_model(asked: str, limits: ModelLimits) -> None:
    """Raises UnknownModel when a name is given that is not this model's."""
    if asked and asked != limits.name:
        raise UnknownModel(f"there is no model of that name here; known: {limits.name}", field="model")


def check_choices(call: Call) -> None:
    """Raises InvalidRequest for `n`, `best_of` or `priority` out of bounds; nothing is clamped."""
    _check_whole("n", call.n, 1, MAX_CHOICES)
    if call.best_of is not None:
        _check_whole("best_of", call.best_of, 1, MAX_CHOICES)
        if call.best_of < call.n:
            raise InvalidRequest(
                f"best_of ({call.best_of}) is below n ({call.n}): it counts the choices to pick from", field="best_of"
            )
    _check_whole("priority", call.priority, 0, BANDS - 1)


def _check_whole(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidRequest(f"{field} must be from {low} to {high}, not {value}", field=field)


def check_token_ids(token_ids: tuple[int, ...], limits: ModelLimits, field: str) -> None:
    """Raises InvalidRequest for the first id outside the vocabulary."""
    # min and max run in C; only a prompt that is wrong pays for finding where.
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < limits.vocab_size):
        return
    for i, token in enumerate(token_ids):
        if not 0 <= token < limits.vocab_size:
            raise InvalidRequest(
                f"{field}[{i}] is {token}, outside the vocabulary of {limits.vocab_size} ids", field=f"{field}[{i}]"
            )


def check_prompt_length(length: int, limits: ModelLimits, field: str) -> None:
    """Raises InvalidRequest for an empty prompt, TooLong for one that leaves no room for an output token."""
    if length == 0:
        raise InvalidRequest(f"{field} is empty: it must have at least one token", field=field)
    if length >= limits.max_context:
        raise TooLong(
            f"{field} has {length} tokens and the context is {limits.max_context}: no room for an output token",
            field=field,
        )


def resolve(
    call: Call,
    token_ids: tuple[int, ...],
    limits: ModelLimits,
    capacity: Capacity,
    *,
    request_id: str,
    drawn_seed: int,
) -> Request:
    """The request to admit, with `max_tokens` and `seed` set. Raises InvalidRequest, TooLong or UnknownModel."""
    check_model(call.model, limits)
    check_choices(call)
    sampling = call.sampling.validated()
    limits = replace(limits, max_context=min(limits.max_context, capacity.max_context))
    check_token_ids(token_ids, limits, call.prompt_field)
    check_prompt_length(len(token_ids), limits, call.prompt_field)
    _check_ids_of_sampling(sampling, limits)
    max_tokens = _resolve_max_tokens(call, len(token_ids), limits, capacity)
    if sampling.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens ({sampling.min_tokens}) is above the {max_tokens} tokens that fit", field="min_tokens"
        )
    seed = sampling.seed if sampling.seed is not None else drawn_seed
    return Request(
        id=request_id,
        model=limits.name,
        prompt_token_ids=token_ids,
        sampling=replace(sampling, max_tokens=max_tokens, seed=seed),
        tenant=call.tenant,
        band=call.priority,
        n=call.computed_choices,
        best=call.n if call.computed_choices > call.n else 0,
    )


def _check_ids_of_sampling(sampling: SamplingParams, limits: ModelLimits) -> None:
    check_token_ids(sampling.stop_token_ids, limits, "stop_token_ids")
    for token, _ in sampling.logit_bias:
        if not 0 <= token < limits.vocab_size:
            raise InvalidRequest(
                f"logit_bias has id {token}, outside the vocabulary of {limits.vocab_size} ids", field="logit_bias"
            )


def _resolve_max_tokens(call: Call, prompt_tokens: int, limits: ModelLimits, capacity: Capacity) -> int:
    """The choices of a request share their prompt and hold an output each: that is what a pool must have room for."""
    asked, choices = call.sampling.max_tokens, call.computed_choices
    fits_context = limits.max_context - prompt_tokens
    fits_pool = (capacity.pool_tokens - prompt_tokens) // choices
    what = f"a prompt of {prompt_tokens} tokens" + (f" and {choices} choices" if choices > 1 else "")
    if fits_pool < 1:
        raise TooLong(
            f"{call.prompt_field} has {prompt_tokens} tokens and no worker's KV pool holds more than "
            f"{capacity.pool_tokens}" + (f" with an output for each of {choices} choices" if choices > 1 else ""),
            field=call.prompt_field,
        )
    if asked is None:
        return min(fits_context, fits_pool)
    if asked > fits_context:
        raise TooLong(
            f"{call.max_tokens_field} is {asked}, but with a prompt of {prompt_tokens} tokens only {fits_context} fit "
            f"the context of {limits.max_context}",
            field=call.max_tokens_field,
        )
    if asked > fits_pool:
        raise TooLong(
            f"{call.max_tokens_field} is {asked}, but with {what} only {fits_pool} fit the largest worker's "
            f"KV pool of {capacity.pool_tokens} tokens",
            field=call.max_tokens_field,
        )
    return asked
