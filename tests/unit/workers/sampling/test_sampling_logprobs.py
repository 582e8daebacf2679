"""Log probabilities against float64 log_softmax, whatever else is asked of the row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headrace.logprobs import TokenLogprob
from headrace.sampling import SamplingParams
from workers.model.interface import SampleSpec
from workers.sampling import logprobs as module
from workers.sampling.logprobs import logprobs
from workers.sampling.sampler import Sampler

VOCABULARY = 4_000
TOLD = SamplingParams(max_tokens=1, logprobs=5)


def random_logits(rows: int, scale: float = 4.0, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(2)) * scale


def assert_right(told: TokenLogprob, logits: Tensor, token: int, top: int) -> None:
    expected = logits.double().log_softmax(-1)
    order = sorted(range(len(expected)), key=lambda i: (-float(logits[i]), i))
    assert told.logprob == pytest.approx(float(expected[token]), abs=1e-4)
    assert told.rank == order.index(token) + 1
    assert [i for i, _ in told.top] == order[:top]
    assert [value for _, value in told.top] == pytest.approx(expected[order[:top]].tolist(), abs=1e-4)


@pytest.mark.parametrize("scale", [0.0, 0.01, 4.0, 40.0])
@pytest.mark.parametrize("vocabulary", [60, VOCABULARY])
def test_they_are_log_softmax_of_the_logits(scale: float, vocabulary: int) -> None:
    logits = random_logits(6, scale, vocabulary)
    targets = [0, 7, vocabulary - 1, int(logits[3].argmax()), int(logits[4].argmin()), 31]
    tops = [0, 1, 20, 20, 3, 5]
    for row, told in enumerate(logprobs(logits, targets, tops)):
        assert_right(told, logits[row], targets[row], tops[row])


def test_equal_logits_are_ranked_by_id() -> None:
    logits = random_logits(4).bfloat16()
    for row, told in enumerate(logprobs(logits, [5] * 4, [20] * 4)):
        assert_right(told, logits[row], 5, 20)


def test_pieces_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, targets, tops = random_logits(7), list(range(7)), [0, 3, 0, 0, 20, 1, 0]
    whole = logprobs(logits, targets, tops)
    monkeypatch.setattr(module, "PIECE_LOGITS", 2 * VOCABULARY)
    assert logprobs(logits, targets, tops) == whole


def test_sampled_tokens_are_told_of_the_models_own_distribution() -> None:
    """Temperature, penalties, biases and limits change the token, not what is told of it."""
    logits = random_logits(5)
    best = int(logits[4].argmax())
    several = [
        TOLD,
        replace(TOLD, temperature=0.3, top_k=7, logprobs=20),
        replace(TOLD, temperature=0.0, logprobs=0),
        replace(TOLD, repetition_penalty=5.0, presence_penalty=2.0, min_p=0.1),
        replace(TOLD, temperature=0.0, logit_bias=((best, -100.0),)),
    ]
    specs = [SampleSpec(params, 3, 0, 0, tokens=[1, 2], prompt_tokens=2) for params in several]
    results = Sampler(VOCABULARY, logits.device).sample(logits, specs)
    assert results[4].token_id != best
    for row, (result, params) in enumerate(zip(results, several, strict=True)):
        assert result.logprob is not None
        assert_right(result.logprob, logits[row], result.token_id, params.logprobs or 0)


def test_only_rows_that_ask_are_told_and_all_as_if_alone() -> None:
    logits = random_logits(6)
    specs = [SampleSpec(replace(TOLD, logprobs=row % 3 or None), 0, 0, row) for row in range(6)]
    sampler = Sampler(VOCABULARY, logits.device)
    together = sampler.sample(logits, specs)
    assert [result.logprob is None for result in together] == [row % 3 == 0 for row in range(6)]
    assert together == tuple(sampler.sample(logits[row : row + 1], specs[row : row + 1])[0] for row in range(6))


def test_a_row_that_fails_is_told_nothing_and_hides_no_neighbour() -> None:
    logits = random_logits(2)
    logits[0, 9] = torch.nan
    broken, fine = Sampler(VOCABULARY, logits.device).sample(logits, [SampleSpec(TOLD, 0, 0, 0)] * 2)
    assert broken.fault
    assert broken.logprob is None
    assert fine.logprob is not None
