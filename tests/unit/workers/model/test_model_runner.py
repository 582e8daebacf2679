"""The runner over tiny random models: against transformers' own attention, and one bad request beside good ones."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import pytest
import torch

from headrace.sampling import SamplingParams
from workers.config import EngineConfig
from workers.model.interface import Computed, SampleSpec, SequenceSlice
from workers.model.loader import load_runner
from workers.model.runner import TorchRunner
from workers.scheduler.step_time import Features, StepTime, pass_of

BLOCK = 4
GREEDY = SampleSpec(SamplingParams(max_tokens=1, temperature=0.0), seed=0, choice=0, token_index=0)


class MakeModel(Protocol):
    def __call__(self, model_type: str, poisoned_token: int | None = None, **changes: object) -> Path: ...


def runner_for(folder: Path, num_blocks: int | None = 40, **settings: object) -> TorchRunner:
    config = EngineConfig(
        str(folder),
        "tiny",
        dtype="float32",
        num_blocks=num_blocks,
        block_size=BLOCK,
        threads=1,
        **settings,  # type: ignore[arg-type]
    )
    return load_runner(config)


def whole(tokens: tuple[int, ...], block_ids: tuple[int, ...]) -> SequenceSlice:
    return SequenceSlice(tokens, 0, block_ids, GREEDY)


def continued(
    runner: TorchRunner, prompt: tuple[int, ...], blocks: tuple[int, ...], chunk: int, count: int
) -> list[int]:
    """Greedy tokens after computing the prompt in chunks."""
    known = list(prompt)
    computed, output = 0, []
    while len(output) < count:
        end = min(computed + chunk, len(known))
        sample = GREEDY if end == len(known) else None
        (given,) = runner.forward((SequenceSlice(tuple(known[computed:end]), computed, blocks, sample),))
        result = given.sampled
        computed = end
        if sample is None:
            assert result is None
            continue
        assert result is not None
        assert not result.fault
        output.append(result.token_id)
        known.append(result.token_id)
    return output


def stock_greedy(folder: Path, prompt: tuple[int, ...], count: int) -> list[int]:
    """transformers with its own attention, recomputing everything for every token."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    known = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            known.append(int(model(torch.tensor([known])).logits[0, -1].argmax()))
    return known[len(prompt) :]


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mistral", "gemma", "phi3", "olmo2", "granite"])
@pytest.mark.parametrize("attention", ["cpu", "reference"])
def test_any_architecture_gives_the_tokens_of_its_own_attention(
    make_model: MakeModel, model_type: str, attention: str
) -> None:
    changes = {"sliding_window": None} if model_type == "mistral" else {}
    folder = make_model(model_type, **changes)
    prompt = (5, 44, 17, 80, 3, 9, 61, 22, 70, 11, 36)
    runner = runner_for(folder, attention=attention)
    wanted = stock_greedy(folder, prompt, 8)
    assert continued(runner, prompt, (7, 2, 31, 4, 9), chunk=4, count=8) == wanted
    assert continued(runner, prompt, (1, 3, 5, 6, 8), chunk=100, count=8) == wanted


@pytest.fixture(scope="module")
def runner(make_model: MakeModel) -> TorchRunner:
    return runner_for(make_model("llama"))


def test_neighbours_and_order_do_not_change_a_token(runner: TorchRunner) -> None:
    slices = [whole(tuple(range(i + 3, 3 * i + 5)), tuple(range(i * 5, i * 5 + 5))) for i in range(7)]
    together = runner.forward(slices)
    assert together == tuple(runner.forward((s,))[0] for s in slices)
    assert together == tuple(reversed(runner.forward(slices[::-1])))


def test_decodes_chunks_and_silent_slices_share_a_pass(runner: TorchRunner) -> None:
    first, second = (5, 6, 7, 8, 9, 10), (40, 41, 42, 43, 44, 45, 46)
    alone = [runner.forward((whole(first, (0, 1)),))[0], runner.forward((whole(second, (2, 3)),))[0]]
    runner.forward((SequenceSlice(first[:5], 0, (10, 11), None), SequenceSlice(second[:2], 0, (12, 13), None)))
    mixed = runner.forward(
        (
            SequenceSlice(first[5:], 5, (10, 11), GREEDY),
            SequenceSlice((90, 91, 92), 0, (20,), None),
            SequenceSlice(second[2:], 2, (12, 13), GREEDY),
        )
    )
    assert mixed == (alone[0], Computed(), alone[1])


def test_no_slices_is_no_pass(runner: TorchRunner) -> None:
    assert runner.forward(()) == ()


@pytest.mark.parametrize("illegal", [-1, 97, 2**40])
def test_an_id_outside_the_vocabulary_fails_its_own_request_only(runner: TorchRunner, illegal: int) -> None:
    good = whole((5, 6, 7), (0,))
    wanted = runner.forward((good,))[0]
    results = runner.forward((whole((5, illegal, 7), (3,)), good, SequenceSlice((illegal,), 0, (4,), None)))
    assert results[1] == wanted
    for bad in (results[0], results[2]):
        assert bad.sampled is not None
        assert "outside the vocabulary of 97" in bad.sampled.fault


def test_nan_fails_its_own_request_and_leaves_nothing_in_its_blocks(make_model: MakeModel) -> None:
    runner = runner_for(make_model("llama", poisoned_token=33))
    good, other = whole((5, 6, 7), (0,)), whole((8, 9, 10, 11, 12), (1, 2))
    wanted = runner.forward((good, other))
    results = runner.forward((good, whole((33, 5, 7, 8, 9, 5, 7, 8), (3, 4)), other))
    assert (results[0], results[2]) == wanted
    assert results[1].sampled is not None
    assert "not numbers" in results[1].sampled.fault
    # The next owner fills its block only in part, and decodes, padded to a longer neighbour: the kernel reads
    # and masks the slots behind its last token. What the failed request left there must not reach it.
    short = (SequenceSlice((5,), 0, (3,), None), SequenceSlice((6,), 1, (3,), GREEDY))
    long = (SequenceSlice((8, 9, 10, 11), 0, (6, 7), None), SequenceSlice((12,), 4, (6, 7), GREEDY))
    runner.forward((short[0], long[0]))
    decoded = runner.forward((short[1], long[1]))
    fresh = runner.forward((whole((5, 6), (20,)), whole((8, 9, 10, 11, 12), (21, 22))))
    assert decoded == fresh


def test_nan_is_told_of_a_chunk_that_nothing_is_sampled_from(make_model: MakeModel) -> None:
    """Its owner may be cancelled or preempted before it samples: what is left in the blocks has to be numbers."""
    runner = runner_for(make_model("llama", poisoned_token=33))
    good, chunk = whole((5, 6, 7), (0,)), SequenceSlice((33, 5, 7, 8, 9, 5), 0, (3, 4, 5), None)
    wanted = runner.forward((good,))[0]
    healthy = SequenceSlice((8, 9, 10), 0, (6, 7), None)
    results = runner.forward((good, chunk, healthy))
    assert (results[0], results[2]) == (wanted, Computed())
    assert results[1].sampled is not None
    assert "not numbers" in results[1].sampled.fault
    assert all(torch.isfinite(cache).all() for cache in (*runner._cache.keys, *runner._cache.values))


def test_warm_up_measures_a_pass_and_leaves_the_cache_clean(make_model: MakeModel) -> None:
    runner = runner_for(make_model("llama"), num_blocks=6)
    assert 0.0 < runner.warm_up(chunk_tokens=512) < 60.0
    assert not any(cache.any() for cache in (*runner._cache.keys, *runner._cache.values))


def test_warm_up_tells_how_long_its_passes_took(make_model: MakeModel) -> None:
    runner, step_time, told = runner_for(make_model("llama"), num_blocks=40), StepTime(), []

    def watch(features: Features, seconds: float) -> None:
        told.append(features)
        step_time.measured(features, seconds)

    longest_s = runner.warm_up(128, watch)
    assert [sum(column) > 0 for column in zip(*told, strict=True)] == [True] * len(Features._fields)
    assert 0.0 < step_time.predict_s(pass_of([(0, 128)])) <= 2 * longest_s


def test_shape_says_what_scheduling_needs(make_model: MakeModel) -> None:
    folder = make_model("llama")
    shape = runner_for(folder, max_context=100).shape
    assert (shape.name, shape.vocab_size, shape.max_context) == ("tiny", 97, 100)
    assert shape.bytes_per_token_kv == 2 * 3 * 2 * 8 * 4
    assert shape.eos_token_ids == (2, 96)
    assert "float32" in shape.numerics
    assert "1-threads" in shape.numerics
    assert shape.numerics.endswith("/cpu")


def test_blocks_follow_the_memory_budget_when_not_given(make_model: MakeModel) -> None:
    block_bytes = BLOCK * 2 * 3 * 2 * 8 * 4
    runner = runner_for(make_model("llama"), num_blocks=None, kv_bytes=10 * block_bytes + 1)
    assert runner.num_blocks == 10
