"""The sampling parameters of a batch as tensors, gathered once and kept while the batch stays as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.sampling import SamplingParams
from workers.model.interface import SampleSpec

COLDEST = 1e-30
"""Temperatures below this draw the highest logit just as surely, and would be 0 in float32. As the smallest repetition
penalty it keeps logits finite."""


@dataclass(frozen=True)
class Biases:
    """What is added to single logits: `value[i]` (-inf: the id is banned) to id `token[i]` of row `row[i]`."""

    row: Tensor
    token: Tensor
    value: Tensor


PIECE_LOGITS = {"cpu": 1 << 20, "cuda": 1 << 24}
"""Most logits drawn from together: what a core's caches hold, or what a GPU's memory has to spare."""


@dataclass(frozen=True)
class DrawnRows:
    """The parameters of rows that draw, `[drawn, 1]` each; `rows` says which of the batch they are."""

    rows: list[int]
    index: slice | Tensor
    """The same: a slice where they follow one another, which makes a view."""
    temperature: Tensor
    top_k: Tensor
    """The vocabulary's size where there is no limit."""
    top_p: Tensor
    min_p: Tensor
    narrow_k: list[int]
    """Which of the drawn have a top-k up to WIDE_K, and …"""
    wide_k: list[int]
    """… beyond it."""
    with_p: list[int]
    has_min_p: bool


WIDE_K = 1024
"""Rows with a larger top-k are looked at apart: the widest of a pass sets its cost."""


@dataclass(frozen=True)
class Penalties:
    """`[rows, 1]` each, float32, for the penalised rows of the batch."""

    rows: list[int]
    repetition: Tensor
    presence: Tensor
    frequency: Tensor


@dataclass(frozen=True)
class BatchParameters:
    """Everything about a batch that its rows' parameters and bans decide; the token index has no part in it."""

    biases: Biases | None
    penalties: Penalties | None
    drawn: tuple[DrawnRows, ...]
    """All rows that draw, in pieces that are not too large."""
    all_draw: bool
    told: list[int]
    """Rows whose log probabilities are asked for."""

    @staticmethod
    def of(specs: Sequence[SampleSpec], vocabulary: int, device: torch.device) -> BatchParameters:
        params = [spec.params for spec in specs]
        return BatchParameters(
            _biases(specs, vocabulary, device),
            _penalties(params, device),
            tuple(_drawn(params, rows, vocabulary, device) for rows in _pieces(params, vocabulary, device)),
            all(p.temperature > 0 for p in params),
            [row for row, p in enumerate(params) if p.logprobs is not None],
        )


class ParametersOfLastBatch:
    """`BatchParameters.of`, but the same again while the same rows come in the same order."""

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self._vocabulary = vocabulary
        self._device = device
        self._last: tuple[list[tuple[SamplingParams, tuple[int, ...]]], BatchParameters] | None = None

    def of(self, specs: Sequence[SampleSpec]) -> BatchParameters:
        # Of a stable batch every element is the very object of the last time, which is all that comparing looks at.
        key = [(spec.params, spec.banned_token_ids) for spec in specs]
        if self._last is None or self._last[0] != key:
            self._last = (key, BatchParameters.of(specs, self._vocabulary, self._device))
        return self._last[1]


def _biases(specs: Sequence[SampleSpec], vocabulary: int, device: torch.device) -> Biases | None:
    added: dict[tuple[int, int], float] = {}
    for row, spec in enumerate(specs):
        for token, bias in spec.params.logit_bias:
            if token < vocabulary:
                added[row, token] = added.get((row, token), 0.0) + bias
        for token in spec.banned_token_ids:
            if 0 <= token < vocabulary:
                added[row, token] = -torch.inf
    if not added:
        return None
    places = torch.tensor(list(added), device=device).T
    return Biases(places[0], places[1], torch.tensor(list(added.values()), device=device))


def _penalties(params: Sequence[SamplingParams], device: torch.device) -> Penalties | None:
    rows = [
        row
        for row, p in enumerate(params)
        if p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0
    ]
    if not rows:
        return None
    values = [
        (max(params[row].repetition_penalty, COLDEST), params[row].presence_penalty, params[row].frequency_penalty)
        for row in rows
    ]
    repetition, presence, frequency = torch.tensor(values, device=device).T[..., None].unbind()
    return Penalties(rows, repetition, presence, frequency)


def _pieces(params: Sequence[SamplingParams], vocabulary: int, device: torch.device) -> list[list[int]]:
    rows = [row for row, p in enumerate(params) if p.temperature > 0]
    size = max(1, PIECE_LOGITS[device.type] // vocabulary)
    return [rows[first : first + size] for first in range(0, len(rows), size)]


def _drawn(params: Sequence[SamplingParams], rows: list[int], vocabulary: int, device: torch.device) -> DrawnRows:
    drawn = [params[row] for row in rows]
    values = [(p.temperature, min(p.top_k or vocabulary, vocabulary), p.top_p, p.min_p) for p in drawn]
    columns = torch.tensor(values, dtype=torch.float64, device=device).T[..., None]
    limited = [i for i, p in enumerate(drawn) if 0 < p.top_k < vocabulary]
    follow = rows[-1] - rows[0] == len(rows) - 1
    return DrawnRows(
        rows=rows,
        index=slice(rows[0], rows[-1] + 1) if follow else torch.tensor(rows, device=device),
        temperature=columns[0].float().clamp_(min=COLDEST),
        top_k=columns[1].long(),
        top_p=columns[2],
        min_p=columns[3].float(),
        narrow_k=[i for i in limited if drawn[i].top_k <= WIDE_K],
        wide_k=[i for i in limited if drawn[i].top_k > WIDE_K],
        with_p=[i for i, p in enumerate(drawn) if p.top_p < 1.0],
        has_min_p=any(p.min_p > 0.0 for p in drawn),
    )
