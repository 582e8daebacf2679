"""Reused KV on the real model in float32: cold = warm = without a cache = preempted = through host memory, token by
token, and n choices are n requests.

No reference is needed: every engine here shares one set of weights, and the cold run on a large pool is what the others
are held to. Each test reads the counters that show that it is not vacuous.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace.frame import FinishReason
from headrace.request import BoundRequest, Request
from headrace.sampling import SamplingParams
from headrace.tokenizer import Tokenizer
from workers.attention.interface import AttentionSpec
from workers.attention.registry import resolve_attention
from workers.config import EngineConfig
from workers.engine import Engine
from workers.model.runner import TorchRunner
from workers.model.weights import LoadedModel, load_model, use_threads

BLOCK = 16
TEXT = (
    "Once upon a time, in a small village by the sea, there lived a fisherman who went out every morning before the "
    "sun rose. One day he caught a fish with golden scales, and the fish spoke to him: let me go, and I will grant you "
    "whatever your heart desires. The fisherman thought of his wife, of the leaking roof above their heads, and of the "
    "long winter that was coming. He looked at the grey water, then at the fish, and after a while he answered that he "
    "wanted nothing for himself, but that the village needed a harbour, a school and a lamp upon the rocks. The fish "
    "was silent for a long time. Nobody had ever asked it for such things before, and it had lived for a thousand years"
)
LENGTHS = (BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 7 * BLOCK + 3)
MAX_STEPS = 5_000

Answers = dict[tuple[str, int], tuple[int, ...]]


class Lab:
    """Engines over one set of weights, and the prompts."""

    def __init__(self, path: Path) -> None:
        use_threads(0)
        self.config = EngineConfig(str(path), "equivalence", dtype="float32", num_blocks=512, block_size=BLOCK)
        self.model: LoadedModel = load_model(self.config)
        self.tokenizer = Tokenizer.load(path)
        self.text = tuple(self.tokenizer.encode(TEXT, add_special=False))

    def engine(self, **changes: object) -> Engine:
        config = replace(self.config, **changes)  # type: ignore[arg-type]
        geometry = self.model.geometry
        spec = AttentionSpec(
            torch.device("cpu"), torch.float32, geometry.num_heads, geometry.num_kv_heads, geometry.head_dim, BLOCK
        )
        return Engine(TorchRunner(config, self.model, resolve_attention("auto", spec)), config, self.tokenizer)


@pytest.fixture(scope="module")
def lab(model_path: Path) -> Lab:
    return Lab(model_path)


def request(name: str, prompt: Sequence[int], max_tokens: int, n: int = 1, **params: object) -> Request:
    given: dict[str, object] = {"temperature": 0.0, "seed": 0, "ignore_eos": True, **params}
    return Request(name, "equivalence", tuple(prompt), SamplingParams(max_tokens=max_tokens, **given), n=n)  # type: ignore[arg-type]


def run(engine: Engine, *requests: Request, cancel: Sequence[str] = ()) -> Answers:
    """All at once, to their ends; those named in `cancel` are cancelled after their first tokens."""
    for order, each in enumerate(requests):
        engine.add(BoundRequest(each, 1, "router~1", f"1-{order}", ()))
    answers: dict[tuple[str, int], list[int]] = {(r.id, choice): [] for r in requests for choice in range(r.n)}
    open_choices = set(answers)
    for _ in range(MAX_STEPS):
        if not open_choices:
            engine.check()
            assert engine.load().held_blocks == 0
            return {key: tuple(tokens) for key, tokens in answers.items()}
        frame = engine.step()
        assert frame is not None, "the engine idles"
        for part in frame.parts:
            key = (part.request_id, part.choice)
            assert part.first_index == len(answers[key]), "a token is missing or came twice"
            answers[key] += part.token_ids
            if part.finish is not None:
                assert part.finish is not FinishReason.FAILED, part.detail
                open_choices.discard(key)
            elif part.request_id in cancel and len(answers[key]) >= 3:
                engine.cancel(part.request_id, "2-0")
    raise AssertionError(f"{len(open_choices)} choices unfinished")


def of_lengths(lab: Lab, lengths: Sequence[int], max_tokens: int, tag: str) -> list[Request]:
    return [request(f"{tag}-{length}", lab.text[:length], max_tokens) for length in lengths]


def texts(answers: Answers) -> list[tuple[int, ...]]:
    return list(answers.values())


def hits(engine: Engine) -> int:
    return engine.load().prefix_hit_tokens_total


@pytest.mark.parametrize(
    ("lengths", "max_tokens"),
    [((3 * BLOCK,), 4), pytest.param(LENGTHS, 64, marks=(pytest.mark.slow, pytest.mark.timeout(600)))],
)
def test_cold_warm_and_off_are_one(lab: Lab, lengths: tuple[int, ...], max_tokens: int) -> None:
    off = lab.engine(prefix_cache=False)
    expected = texts(run(off, *of_lengths(lab, lengths, max_tokens, "off")))
    assert hits(off) == 0
    engine = lab.engine()
    assert [texts(run(engine, one))[0] for one in of_lengths(lab, lengths, max_tokens, "cold")] == expected
    noise = [
        request(
            f"noise-{i}", (*lab.text[: max(lengths) - 5], 300 + i), max_tokens, stop=("\n\n", "."), ignore_eos=False
        )
        for i in range(4)
    ]
    run(engine, *noise, cancel=("noise-1", "noise-3"))
    before = hits(engine)
    assert texts(run(engine, *of_lengths(lab, lengths, max_tokens, "warm"))) == expected
    assert hits(engine) - before == sum((length - 1) // BLOCK * BLOCK for length in lengths)
    others = [request(f"other-{i}", (*lab.text[: 20 + i], 200 + i), max_tokens) for i in range(4)]
    beside = run(engine, *of_lengths(lab, lengths, max_tokens, "beside"), *others)
    assert texts(beside)[: len(lengths)] == expected


@pytest.mark.slow
def test_a_conversation_goes_on_from_its_own_answer(lab: Lab) -> None:
    engine, fresh = lab.engine(), lab.engine(prefix_cache=False)
    prompt = lab.text[:37]
    (answer,) = texts(run(engine, request("turn-1", prompt, 30)))
    turn = (*prompt, *answer, *lab.text[40:45])
    before = hits(engine)
    second = texts(run(engine, request("turn-2", turn, 12)))
    assert hits(engine) - before == (len(prompt) + len(answer) - 1) // BLOCK * BLOCK
    assert second == texts(run(fresh, request("turn-2", turn, 12)))


@pytest.mark.slow
def test_prompts_that_part_in_their_second_block_get_their_own_answers(lab: Lab) -> None:
    engine, fresh = lab.engine(), lab.engine(prefix_cache=False)
    one, other = lab.text[:40], (*lab.text[:20], *lab.text[60:80])
    for name, prompt in (("one", one), ("other", other)):
        assert texts(run(engine, request(name, prompt, 8))) == texts(run(fresh, request(name, prompt, 8)))
    assert hits(engine) == BLOCK


@pytest.mark.slow
@pytest.mark.parametrize("length", [2 * BLOCK + 1, 2 * BLOCK + 7])
def test_three_choices_are_three_requests(lab: Lab, length: int) -> None:
    """Greedy: stock kernels give other bits to other batches, and a sampled token may lie at an edge that these bits
    move. Sampled choices are compared bit by bit in row-invariant mode (test_row_invariance.py).
    """
    shared, apart = lab.engine(), lab.engine(prefix_cache=False)
    together = run(shared, request("n", lab.text[:length], 10, n=3))
    assert hits(shared) == 2 * (length - 1)
    alone = texts(run(apart, request("alone", lab.text[:length], 10)))
    assert texts(together) == alone * 3


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("host_mib", [0, 64])
def test_preemption_keeps_the_output(lab: Lab, host_mib: int) -> None:
    """Five requests on a pool of some 130 tokens; each as if it were alone."""
    solo, small = lab.engine(), lab.engine(num_blocks=8, host_kv_bytes=host_mib << 20)
    run(small, *(request(f"teach-{i}", (504, i), 1, stop_token_ids=(0,)) for i in range(30)))
    crowd = [request(f"k{k}", (*lab.text[: 18 + k], 400 + k), 24, stop_token_ids=(0,)) for k in range(5)]
    answers = run(small, *crowd)
    assert small.load().preemptions_total > 0
    for each in crowd:
        assert answers[each.id, 0] == texts(run(solo, each))[0]
        assert len(answers[each.id, 0]) == 24


def test_a_round_trip_through_host_memory_changes_nothing(lab: Lab) -> None:
    engine = lab.engine(num_blocks=12, host_kv_bytes=64 << 20)
    prompt = lab.text[:100]
    cold = texts(run(engine, request("cold", prompt, 4)))
    run(engine, request("other", tuple(reversed(lab.text[:160])), 4))
    warm = texts(run(engine, request("warm", prompt, 4)))
    assert engine.load().host_hit_tokens_total == 4 * BLOCK, "its first two blocks were not evicted"
    assert warm == cold
