"""Penalties against transformers' processors and a plain loop; the counts kept between steps against counts anew."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from headrace.sampling import SamplingParams
from workers.model.interface import SampleSpec
from workers.sampling.penalties import FEWEST_SLOTS, IN_PROMPT, TokenCounts, penalise
from workers.sampling.sampler import Sampler

VOCABULARY = 50
CPU = torch.device("cpu")
PENALISED = SamplingParams(
    max_tokens=1, temperature=0.0, repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.4
)


def spec(prompt: list[int], output: list[int], key: object = None, params: SamplingParams = PENALISED) -> SampleSpec:
    return SampleSpec(params, 0, 0, len(output), key=key, tokens=prompt + output, prompt_tokens=len(prompt))


def dense(specs: list[SampleSpec], counts: TokenCounts | None = None) -> Tensor:
    """Counts of the whole vocabulary, `[rows, vocabulary]`."""
    seen = (counts or TokenCounts(VOCABULARY, CPU)).of(specs)
    return torch.zeros(len(specs), VOCABULARY, dtype=torch.int32).scatter_(1, seen.ids, seen.counts)


def column(*values: float) -> Tensor:
    return torch.tensor(values)[:, None]


def random_logits(rows: int, seed: int = 1) -> Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


def test_repetition_penalty_is_that_of_transformers_over_prompt_and_output() -> None:
    prompts, outputs = [[3, 3, 9, 41], [7]], [[9, 12, 0], []]
    logits = random_logits(2)
    logits[0, 3] = 0.0
    rows = dense([spec(p, o) for p, o in zip(prompts, outputs, strict=True)])
    given = penalise(logits, rows, column(1.3, 0.8), column(0.0, 0.0), column(0.0, 0.0))
    for row, penalty in enumerate((1.3, 0.8)):
        tokens = torch.tensor([prompts[row] + outputs[row]])
        expected = RepetitionPenaltyLogitsProcessor(penalty)(tokens, logits[row : row + 1].clone())
        assert torch.equal(given[row], expected[0])


def test_presence_and_frequency_count_the_output_only() -> None:
    prompt, output = [3, 3, 9, 41], [9, 12, 12, 12, 0]
    logits = random_logits(1)
    rows = dense([spec(prompt, output)])
    given = penalise(logits, rows, column(1.0), column(1.5), column(-0.3))[0].tolist()
    counts = Counter(output)
    for token, (before, after) in enumerate(zip(logits[0].tolist(), given, strict=True)):
        expected = before - (-0.3 * counts[token] + 1.5 if token in counts else 0.0)
        assert after == pytest.approx(expected, abs=1e-5)


def counted(spec: SampleSpec) -> list[int]:
    prompt, output = spec.tokens[: spec.prompt_tokens], spec.tokens[spec.prompt_tokens :]
    counts = Counter(output)
    return [counts[token] + IN_PROMPT * (token in prompt) for token in range(VOCABULARY)]


def test_counts_kept_between_steps_are_those_counted_anew() -> None:
    """Sequences come and go, sit steps out, jump ahead and are asked again: always the plain count."""
    chance = random.Random(5)
    counts = TokenCounts(VOCABULARY, CPU)
    sequences = [
        (object(), [chance.randrange(VOCABULARY) for _ in range(chance.randrange(1, 9))], []) for _ in range(9)
    ]
    for _ in range(150):
        chosen = chance.sample(sequences, chance.randrange(1, 7))
        specs = [spec(prompt, output, key) for key, prompt, output in chosen]
        assert dense(specs, counts).tolist() == [counted(s) for s in specs]
        for _, _, output in chosen:
            output += [chance.randrange(VOCABULARY) for _ in range(chance.choice((0, 1, 1, 1, 1, 2)))]


def test_a_step_that_follows_on_reads_only_the_last_token() -> None:
    class LastOnly(list[int]):
        def __getitem__(self, index: object) -> int:  # type: ignore[override]
            assert index == -1
            return super().__getitem__(-1)

        def __iter__(self) -> None:  # type: ignore[override]
            raise AssertionError("all tokens were read")

    counts, key = TokenCounts(VOCABULARY, CPU), object()
    counts.of([spec([1, 2], [3], key)])
    following = replace(spec([1, 2], [3, 4], key), tokens=LastOnly([1, 2, 3, 4]))
    assert dense([following], counts).tolist() == [counted(spec([1, 2], [3, 4]))]


def test_memory_is_bounded_by_the_widest_pass() -> None:
    counts = TokenCounts(VOCABULARY, CPU)
    for i in range(40):
        counts.of([spec([i], [i + 1], object()) for _ in range(3)])
    assert counts._table.shape[0] == len(counts._slots) == FEWEST_SLOTS
    wide = [spec([i], [i + 1], object()) for i in range(FEWEST_SLOTS + 1)]
    assert dense(wide, counts).tolist() == [counted(s) for s in wide]
    assert counts._table.shape[0] == 2 * FEWEST_SLOTS


def test_ids_outside_the_vocabulary_are_not_counted() -> None:
    rows = dense([spec([1, VOCABULARY, -1, 2**40], [2])])
    assert rows.tolist() == [counted(spec([1], [2]))]


def test_penalties_reach_no_neighbour_and_the_logits_stay_as_they_were() -> None:
    logits = random_logits(4, seed=7)
    logits[:] = logits[0]
    before = logits.clone()
    best = int(logits[0].argmax())
    greedy = SamplingParams(max_tokens=1, temperature=0.0)
    specs = [
        spec([best], [], object(), greedy),
        spec([], [best] * 9, object(), replace(greedy, frequency_penalty=2.0)),
        spec([best], [5], object(), replace(greedy, frequency_penalty=2.0, presence_penalty=2.0)),
        spec([best], [], object(), replace(greedy, repetition_penalty=10.0)),
    ]
    ids = [result.token_id for result in Sampler(VOCABULARY, CPU).sample(logits, specs)]
    assert (ids[0], ids[2]) == (best, best)
    assert best not in (ids[1], ids[3])
    assert torch.equal(logits, before)


def test_a_replay_from_any_point_gives_the_same_tokens() -> None:
    """As after preemption, and as on another worker that knows only the tokens."""
    params = replace(PENALISED, temperature=0.8, top_p=0.9)
    steps = random_logits(30, seed=3)
    sampler, key, output = Sampler(VOCABULARY, CPU), object(), []
    for step in steps:
        output.append(sampler.sample(step[None], [spec([4, 4, 8], output, key, params)])[0].token_id)
    assert len(set(output)) > 5
    for start in (0, 1, 13, 29):
        other, again = Sampler(VOCABULARY, CPU), output[:start]
        for step in steps[start:]:
            again.append(other.sample(step[None], [spec([4, 4, 8], again, key, params)])[0].token_id)
        assert again == output


def test_the_smallest_repetition_penalty_leaves_numbers() -> None:
    params = SamplingParams(max_tokens=1, repetition_penalty=1e-300).validated()
    logits = random_logits(1)
    logits[0, 2] = -torch.inf
    result = Sampler(VOCABULARY, CPU).sample(logits, [spec([1, 2, 3], [], None, params)])[0]
    assert not result.fault
