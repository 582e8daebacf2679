"""Penalties on ids that have been there, and the counts behind them.

A row's counts are a pure function of its tokens. They stay on the device between steps and take in one token a step;
where a step does not follow on the last one seen of the same sequence (its first, or the one after a step that the row
sat out) they are counted anew from all its tokens, with the same result.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.model.interface import SampleSpec

IN_PROMPT = 1 << 30
"""Flag in a count: the id stands in the prompt. The bits below it count the output."""
FEWEST_SLOTS = 4
FEWEST_POSITIONS = 256


@dataclass
class _Slot:
    line: int
    token_index: int
    """Output tokens that are counted."""


@dataclass(frozen=True)
class Seen:
    """The ids that each of some rows has had, `[rows, most tokens]`. Some stand there more than once, and behind the
    last comes anything: what is done to an id must depend on nothing but its logit and its count.
    """

    ids: Tensor
    """int64."""
    counts: Tensor
    """int32: how often the id stands in the row's output, with IN_PROMPT where it stands in the prompt."""


class TokenCounts:
    """Counts, int32 `[slots, vocabulary]`, and beside them the tokens themselves, int32 `[slots, positions]`: penalties
    touch as many logits as a sequence has tokens, not the whole vocabulary. There are as many slots as penalised rows
    ever shared a pass, and as many positions as the longest of them had, both rounded up to a power of two. Whose turn
    was longest ago gives its slot to a newcomer.
    """

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self._vocabulary = vocabulary
        self._table = torch.zeros((0, vocabulary), dtype=torch.int32, device=device)
        self._tokens = torch.zeros((0, FEWEST_POSITIONS), dtype=torch.int32, device=device)
        self._slots: OrderedDict[object, _Slot] = OrderedDict()

    def of(self, specs: Sequence[SampleSpec]) -> Seen:
        """What has been there in each of `specs`, all different sequences."""
        keys = [object() if spec.key is None else spec.key for spec in specs]
        known = [self._slots.get(key) for key in keys]
        for key, slot in zip(keys, known, strict=True):
            if slot is not None:
                self._slots.move_to_end(key)
        most = max(len(spec.tokens) for spec in specs)
        self._make_room(len(specs), most)
        slots = [slot or self._assign(key) for key, slot in zip(keys, known, strict=True)]
        follow: list[tuple[int, SampleSpec]] = []
        anew: list[tuple[int, SampleSpec]] = []
        for spec, slot in zip(specs, slots, strict=True):
            if slot.token_index == spec.token_index - 1:
                follow.append((slot.line, spec))
            elif slot.token_index != spec.token_index:
                anew.append((slot.line, spec))
            slot.token_index = spec.token_index
        self._append(follow)
        self._recount(anew)
        lines = torch.tensor([slot.line for slot in slots], device=self._table.device)[:, None]
        ids = self._tokens[lines[:, 0], :most].long()
        return Seen(ids, self._table.view(-1)[ids + lines * self._vocabulary])

    def _make_room(self, rows: int, tokens: int) -> None:
        lines, positions = self._tokens.shape
        if rows > lines:
            more = max(FEWEST_SLOTS, 1 << (rows - 1).bit_length()) - lines
            self._table = torch.cat((self._table, self._table.new_zeros((more, self._vocabulary))))
            self._tokens = torch.cat((self._tokens, self._tokens.new_zeros((more, positions))))
        if tokens > positions:
            more = (1 << (tokens - 1).bit_length()) - positions
            self._tokens = torch.cat((self._tokens, self._tokens.new_zeros((len(self._tokens), more))), dim=1)

    def _assign(self, key: object) -> _Slot:
        """A free line, or that of the sequence not seen for longest: never of one of this pass, they are the latest."""
        line = len(self._slots)
        if line == self._table.shape[0]:
            line = self._slots.popitem(last=False)[1].line
        slot = self._slots[key] = _Slot(line, NOTHING_COUNTED)
        return slot

    def _append(self, rows: Sequence[tuple[int, SampleSpec]]) -> None:
        if rows:
            places = [(line, len(spec.tokens) - 1, spec.tokens[-1]) for line, spec in rows]
            line, position, token = torch.tensor(places, device=self._table.device).unbind(1)
            self._tokens[line, position] = token.int()
            self._count(line * self._vocabulary + token)

    def _recount(self, rows: Sequence[tuple[int, SampleSpec]]) -> None:
        if not rows:
            return
        device = self._table.device
        self._table.index_fill_(0, torch.tensor([line for line, _ in rows], device=device), 0)
        prompts, outputs = [], []
        for line, spec in rows:
            tokens = torch.tensor(spec.tokens, dtype=torch.int64)
            legal = (tokens >= 0) & (tokens < self._vocabulary)  # an illegal id fails its own request, not this pass
            self._tokens[line, : len(tokens)] = torch.where(legal, tokens, 0).to(device, torch.int32)
            flat = tokens + line * self._vocabulary
            prompts.append(flat[: spec.prompt_tokens][legal[: spec.prompt_tokens]])
            outputs.append(flat[spec.prompt_tokens :][legal[spec.prompt_tokens :]])
        self._table.view(-1).index_fill_(0, torch.cat(prompts).to(device), IN_PROMPT)
        self._count(torch.cat(outputs).to(device))

    def _count(self, flat: Tensor) -> None:
        table = self._table.view(-1)
        table.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))


NOTHING_COUNTED = -2
"""No token index follows on it."""


def penalise(logits: Tensor, counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor) -> Tensor:
    """float32 logits and their ids' counts, `[rows, any]` each; the penalties are `[rows, 1]`, without effect at 1, 0
    and 0. Repetition divides positive and multiplies other logits of ids in prompt or output (Keskar et al., CTRL,
    2019; as transformers' RepetitionPenaltyLogitsProcessor); then frequency is taken once for every occurrence in the
    output, and presence once for any (OpenAI's definition: the prompt does not count).
    """
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(counts > 0, repeated, logits)
    in_output = (counts & (IN_PROMPT - 1)).float()
    return logits - in_output * frequency - in_output.clamp(max=1.0) * presence
