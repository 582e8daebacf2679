"""Grammar masks: only allowed ids come, other rows are not touched, and nothing hides a broken row."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from headrace.sampling import SamplingParams
from workers.model.interface import Sampled, SampleSpec
from workers.sampling.masks import apply_masks
from workers.sampling.sampler import Sampler

VOCABULARY = 75
"""Not a multiple of 32: the last word is used in part."""


def sample(logits: Tensor, specs: list[SampleSpec]) -> tuple[Sampled, ...]:
    return Sampler(logits.shape[1], logits.device).sample(logits, specs)


class Allowing:
    """A grammar in which the same ids may come at any time."""

    def __init__(self, ids: Iterable[int]) -> None:
        self._ids = tuple(ids)

    def fill_mask(self, out_row: memoryview) -> None:
        assert (out_row.format, len(out_row), any(out_row)) == ("i", 3, False)
        for token in self._ids:
            word = (out_row[token // 32] & 0xFFFFFFFF) | 1 << token % 32
            out_row[token // 32] = word - (word >> 31 << 32)


def spec(
    allowed: Iterable[int] | None, temperature: float = 0.0, index: int = 0, banned: tuple[int, ...] = ()
) -> SampleSpec:
    params = SamplingParams(max_tokens=1, temperature=temperature)
    return SampleSpec(params, 0, 0, index, banned, None if allowed is None else Allowing(allowed))


def test_bits_stand_for_ids_across_words_and_signs() -> None:
    packed = torch.tensor([[-1, 0, 1 << 10], [-(2**31), 1, -1]], dtype=torch.int32)
    kept = apply_masks(torch.zeros(2, VOCABULARY), packed).isfinite()
    assert kept[0].nonzero()[:, 0].tolist() == [*range(32), 74]
    assert kept[1].nonzero()[:, 0].tolist() == [31, 32, *range(64, 75)]


def test_only_allowed_ids_come_and_rows_without_a_grammar_are_as_before() -> None:
    logits = torch.randn(40, VOCABULARY, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    allowed = (0, 31, 32, 63, 64, 74)
    specs = [spec(allowed if row % 2 else None, 1.0, row) for row in range(40)]
    free = sample(logits, [spec(None, 1.0, row) for row in range(40)])
    given = sample(logits, specs)
    assert {result.token_id for result in given[1::2]} <= set(allowed)
    assert len({result.token_id for result in given[1::2]}) > 2
    assert given[::2] == free[::2]
    assert torch.equal(logits, before)


def test_greedy_takes_the_best_allowed_id() -> None:
    logits = torch.arange(VOCABULARY, dtype=torch.float32)[None]
    assert sample(logits, [spec((3, 40, 50), banned=(50,))])[0].token_id == 40


def test_a_grammar_that_allows_nothing_fails_its_row_with_a_sentence() -> None:
    logits = torch.zeros(3, VOCABULARY)
    results = sample(logits, [spec((4,)), spec(()), spec((4,), banned=(4,))])
    assert (results[0].token_id, results[0].fault) == (4, "")
    assert "forbid every token" in results[1].fault
    assert "forbid every token" in results[2].fault


def test_a_mask_does_not_hide_logits_that_are_no_numbers() -> None:
    logits = torch.zeros(2, VOCABULARY)
    logits[0, 70] = math.nan
    broken, fine = sample(logits, [spec((3,)), spec((3,), 1.0)])
    assert "not numbers" in broken.fault
    assert fine.token_id == 3
