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


@dataclass
class _Slot:
    line: int
    token_index: int
    """Output tokens that are counted."""


class TokenCounts:
    """int32 `[slots, vocabulary]` on the device: as many slots as penalised rows ever shared a pass, rounded up to a
    power of two. Whose turn was longest ago gives its slot to a newcomer.
    """

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self._vocabulary = vocabulary
        self._table = torch.zeros((0, vocabulary), dtype=torch.int32, device=device)
        self._slots: OrderedDict[object, _Slot] = OrderedDict()

    def rows(self, specs: Sequence[SampleSpec]) -> Tensor:
        """The counts for each of `specs`, all different sequences: a copy, `[rows, vocabulary]`."""
        keys = [object() if spec.key is None else spec.key for spec in specs]
        known = [self._slots.get(key) for key in keys]
        for key, slot in zip(keys, known, strict=True):
            if slot is not None:
                self._slots.move_to_end(key)
        self._make_room(len(specs))
        slots = [slot or self._assign(key) for key, slot in zip(keys, known, strict=True)]
        follow: list[tuple[int, int]] = []
        anew: list[tuple[int, SampleSpec]] = []
        for spec, slot in zip(specs, slots, strict=True):
            if slot.token_index == spec.token_index - 1:
                follow.append((slot.line, spec.tokens[-1]))
            elif slot.token_index != spec.token_index:
                anew.append((slot.line, spec))
            slot.token_index = spec.token_index
        self._append(follow)
        self._recount(anew)
        return self._table[torch.tensor([slot.line for slot in slots], device=self._table.device)]

    def _make_room(self, rows: int) -> None:
        have = self._table.shape[0]
        if rows > have:
            more = max(FEWEST_SLOTS, 1 << (rows - 1).bit_length()) - have
            self._table = torch.cat((self._table, self._table.new_zeros((more, self._vocabulary))))

    def _assign(self, key: object) -> _Slot:
        """A free line, or that of the sequence not seen for longest: never of one of this pass, they are the latest."""
        line = len(self._slots)
        if line == self._table.shape[0]:
            line = self._slots.popitem(last=False)[1].line
        slot = self._slots[key] = _Slot(line, NOTHING_COUNTED)
        return slot

    def _append(self, pairs: Sequence[tuple[int, int]]) -> None:
        if pairs:
            flat = torch.tensor([line * self._vocabulary + token for line, token in pairs])
            self._count(flat.to(self._table.device))

    def _recount(self, rows: Sequence[tuple[int, SampleSpec]]) -> None:
        if not rows:
            return
        device = self._table.device
        self._table.index_fill_(0, torch.tensor([line for line, _ in rows], device=device), 0)
        prompts, outputs = [], []
        for line, spec in rows:
            tokens = torch.tensor(spec.tokens, dtype=torch.int64)
            legal = (tokens >= 0) & (tokens < self._vocabulary)  # an illegal id fails its own request, not this pass
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
    """float32 `[rows, vocabulary]`; the penalties are `[rows, 1]`, without effect at 1, 0 and 0. Repetition divides
    positive and multiplies other logits of ids in prompt or output (Keskar et al., CTRL, 2019; as transformers'
    RepetitionPenaltyLogitsProcessor); then frequency is taken once for every occurrence in the output, and presence
    once for any (OpenAI's definition: the prompt does not count).
    """
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(counts > 0, repeated, logits)
    in_output = (counts & (IN_PROMPT - 1)).float()
    return logits.sub_(in_output * frequency).sub_(in_output.clamp_(max=1.0) * presence)
