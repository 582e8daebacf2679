"""Log probabilities from the runner: of prompts in chunks and of sampled tokens, against transformers' own logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headrace.logprobs import TokenLogprob
from headrace.sampling import SamplingParams
from workers.config import EngineConfig
from workers.model.interface import SampleSpec, ScoreSpec, SequenceSlice
from workers.model.loader import load_runner
from workers.model.runner import TorchRunner
from workers.sampling import logprobs

PROMPT = (5, 44, 17, 80, 3, 9, 61, 22, 70, 11, 36)
BLOCKS = (7, 2, 31)
TOP = 3
SAMPLE = SampleSpec(SamplingParams(max_tokens=1, temperature=0.0, logprobs=TOP), seed=0, choice=0, token_index=0)


def runner_for(folder: Path, row_invariant: bool) -> TorchRunner:
    settings = {"num_blocks": 40, "block_size": 4, "threads": 1, "row_invariant": row_invariant}
    return load_runner(EngineConfig(str(folder), "tiny", dtype="float32", **settings))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(make_model: Callable[..., Path]) -> Path:
    return make_model("llama")


@pytest.fixture(scope="module")
def runner(folder: Path) -> TorchRunner:
    """Row-invariant, so that results can be compared to the bit."""
    return runner_for(folder, row_invariant=True)


@pytest.fixture(scope="module")
def expected(folder: Path) -> Tensor:
    """float64 log probabilities `[prompt, vocabulary]`: row i is what may come after token i."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    with torch.inference_mode():
        return model(torch.tensor([PROMPT])).logits[0].double().log_softmax(-1)


def assert_told(told: TokenLogprob, row: Tensor, token: int) -> None:
    likeliest = row.topk(TOP)
    assert told.logprob == pytest.approx(float(row[token]), abs=1e-4)
    assert told.rank == int((row > row[token]).sum()) + 1
    assert [token for token, _ in told.top] == likeliest.indices.tolist()
    assert [value for _, value in told.top] == pytest.approx(likeliest.values.tolist(), abs=1e-4)


def scored(start: int, end: int, blocks: tuple[int, ...] = BLOCKS) -> SequenceSlice:
    sample = SAMPLE if end == len(PROMPT) else None
    return SequenceSlice(PROMPT[start:end], start, blocks, sample, ScoreSpec(PROMPT[start + 1 : end + 1], TOP))


@pytest.mark.parametrize("chunk", [1, 4, 7, 100])
@pytest.mark.parametrize("rows_in_a_piece", [2, 1_000])
def test_prompts_are_scored_across_chunks_beside_others(
    runner: TorchRunner, expected: Tensor, chunk: int, rows_in_a_piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "PIECE_LOGITS", rows_in_a_piece * runner.shape.vocab_size)
    told: list[TokenLogprob] = []
    for start in range(0, len(PROMPT), chunk):
        neighbours = (SequenceSlice((3, 4, 5), 0, (10,), SAMPLE), SequenceSlice((6, 7), 0, (11,), None))
        results = runner.forward((neighbours[0], scored(start, min(start + chunk, len(PROMPT))), neighbours[1]))
        told += results[1].scores
    assert len(told) == len(PROMPT) - 1
    for i, score in enumerate(told):
        assert_told(score, expected[i], PROMPT[i + 1])
    last = results[1].sampled
    assert last is not None
    assert last.logprob is not None
    assert_told(last.logprob, expected[-1], last.token_id)


def test_scores_change_no_token(runner: TorchRunner) -> None:
    plain = replace(scored(0, len(PROMPT)), score=None)
    other = SequenceSlice((3, 4, 5), 0, (10,), SAMPLE)
    without = runner.forward((plain, other))
    beside = runner.forward((scored(0, len(PROMPT)), other))
    assert [r.sampled for r in beside] == [r.sampled for r in without]
    assert without[0].scores == ()


def test_a_token_that_asks_for_no_logprob_gets_none(runner: TorchRunner) -> None:
    silent = replace(SAMPLE, params=SamplingParams(max_tokens=1, temperature=0.0))
    (computed,) = runner.forward((SequenceSlice((3, 4), 0, (10,), silent),))
    assert computed.sampled is not None
    assert computed.sampled.logprob is None


@pytest.mark.parametrize("illegal", [-1, 97])
def test_an_illegal_target_fails_its_own_request_only(runner: TorchRunner, illegal: int) -> None:
    other = SequenceSlice((3, 4, 5), 0, (10,), SAMPLE)
    bad = SequenceSlice((5, 6), 0, (12,), None, ScoreSpec((6, illegal), TOP))
    results = runner.forward((bad, other))
    assert results[0].sampled is not None
    assert "outside the vocabulary" in results[0].sampled.fault
    assert results[0].scores == ()
    assert results[1] == runner.forward((other,))[0]


def test_nan_in_a_scored_row_fails_its_own_request_only(make_model: Callable[..., Path]) -> None:
    runner = runner_for(make_model("llama", poisoned_token=33), row_invariant=False)
    good = scored(0, 8)
    wanted = runner.forward((good,))[0].scores
    bad = SequenceSlice((5, 6, 33, 7), 0, (20,), None, ScoreSpec((6, 33, 7, 8), TOP))
    results = runner.forward((bad, good))
    assert results[0].sampled is not None
    assert "not numbers" in results[0].sampled.fault
    assert results[0].scores == ()
    assert [score.rank for score in results[1].scores] == [score.rank for score in wanted]
    assert [score.logprob for score in results[1].scores] == pytest.approx(
        [score.logprob for score in wanted], abs=1e-5
    )
