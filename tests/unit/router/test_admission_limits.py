"""Which calls become requests: the one policy on lengths, and the refusals that name field and numbers."""

from __future__ import annotations

import pytest

from headrace.errors import HeadraceError, InvalidRequest, Overloaded, TooLong, Unavailable, UnknownModel
from headrace.frame import LoadReport
from headrace.request import Request
from headrace.sampling import SamplingParams
from headrace.store.interface import BoardRow, Refusal, Refused
from router.admission.call import Call, TokenPrompt
from router.admission.limits import Capacity, ModelLimits, capacity_of, resolve
from router.admission.price import PRIOR_OUTPUT_TOKENS, OutputEstimate, price_blocks
from router.admission.refusals import error_for

LIMITS = ModelLimits("tiny", vocab_size=1000, max_context=512)
ROOMY = Capacity(max_context=512, pool_tokens=4096, block_size=16)


def _resolve(prompt: int | tuple[int, ...], capacity: Capacity = ROOMY, model: str = "", **sampling: object) -> Request:
    ids = (26,) * prompt if isinstance(prompt, int) else prompt
    call = Call(model, TokenPrompt(ids), SamplingParams(**sampling))  # type: ignore[arg-type]
    return resolve(call, ids, LIMITS, capacity, request_id="t-1", drawn_seed=77)


def _row(worker: str, *, blocks: int, context: int = 512, model: str = "tiny", lease_ms: int = 1000) -> BoardRow:
    load = LoadReport(
        seq=1, credit_blocks=blocks, free_slots=8, free_blocks=blocks, cached_blocks=0, held_blocks=0,
        total_blocks=blocks, block_size=16, max_context=context, running=0, waiting=0, uncomputed_tokens=0, step_s=0.0,
        drain_tokens_per_s=0.0, iterations=0, prompt_tokens_total=0, output_tokens_total=0, preemptions_total=0,
        draining=False, model=model, weight_version="w", numerics="n",
    )  # fmt: skip
    return BoardRow(worker, load, "0-0", blocks, lease_ms)


@pytest.mark.parametrize(("prompt", "max_tokens"), [(511, 1), (1, 511), (502, 10)])
def test_fits_exactly_to_the_context_edge(prompt: int, max_tokens: int) -> None:
    assert _resolve(prompt, max_tokens=max_tokens).sampling.max_tokens == max_tokens


@pytest.mark.parametrize(("prompt", "max_tokens", "fits"), [(511, 2, 1), (10, 512, 502), (10, 1_000_000, 502)])
def test_explicit_max_tokens_beyond_the_context_is_refused_with_both_numbers(
    prompt: int, max_tokens: int, fits: int
) -> None:
    with pytest.raises(TooLong, match=rf"max_tokens is {max_tokens}, .* only {fits} fit .* 512") as caught:
        _resolve(prompt, max_tokens=max_tokens)
    assert caught.value.field == "max_tokens"


@pytest.mark.parametrize("prompt", [512, 513, 2048])
@pytest.mark.parametrize("max_tokens", [None, 1])
def test_prompt_that_fills_the_context_is_refused(prompt: int, max_tokens: int | None) -> None:
    with pytest.raises(TooLong, match=rf"prompt has {prompt} tokens and the context is 512") as caught:
        _resolve(prompt, max_tokens=max_tokens)
    assert caught.value.field == "prompt"


@pytest.mark.parametrize("max_tokens", [0, -1, -(2**40)])
def test_max_tokens_below_one_is_refused(max_tokens: int) -> None:
    with pytest.raises(InvalidRequest, match="max_tokens must be from 1") as caught:
        _resolve(10, max_tokens=max_tokens)
    assert caught.value.field == "max_tokens"


def test_missing_max_tokens_becomes_what_context_and_pool_hold() -> None:
    assert _resolve(500).sampling.max_tokens == 12
    assert _resolve(100, Capacity(512, 256, 16)).sampling.max_tokens == 156


def test_what_no_pool_could_ever_hold_is_refused() -> None:
    small = Capacity(max_context=512, pool_tokens=256, block_size=16)
    with pytest.raises(TooLong, match="prompt has 300 tokens and no worker's KV pool holds more than 256"):
        _resolve(300, small, max_tokens=4)
    with pytest.raises(TooLong, match=r"max_tokens is 157, .* only 156 fit the largest worker's KV pool of 256"):
        _resolve(100, small, max_tokens=157)
    assert _resolve(100, small, max_tokens=156).sampling.max_tokens == 156


def test_a_worker_with_a_smaller_context_than_the_model_sets_the_limit() -> None:
    with pytest.raises(TooLong, match="context of 128"):
        _resolve(100, Capacity(max_context=128, pool_tokens=4096, block_size=16), max_tokens=64)


def _choices(n: int, best_of: int | None = None, *, capacity: Capacity = ROOMY, **sampling: object) -> Request:
    ids = (26,) * 100
    call = Call("", TokenPrompt(ids), SamplingParams(**sampling), n=n, best_of=best_of)  # type: ignore[arg-type]
    return resolve(call, ids, LIMITS, capacity, request_id="t-1", drawn_seed=77)


def test_choices_share_a_prompt_and_hold_an_output_each() -> None:
    pool = Capacity(max_context=512, pool_tokens=256, block_size=16)
    assert _choices(3, capacity=pool).sampling.max_tokens == 52
    assert _choices(3, capacity=pool, max_tokens=52).n == 3
    with pytest.raises(TooLong, match=r"max_tokens is 53, .* 100 tokens and 3 choices only 52 fit .* pool of 256"):
        _choices(3, capacity=pool, max_tokens=53)
    with pytest.raises(TooLong, match=r"prompt has 100 tokens .* an output for each of 128 choices"):
        _choices(128, capacity=Capacity(512, 227, 16))
    assert _choices(128, capacity=Capacity(512, 228, 16)).sampling.max_tokens == 1


def test_best_of_counts_what_is_computed_and_n_what_is_shown() -> None:
    assert [(r.n, r.best) for r in (_choices(1), _choices(2, 2), _choices(2, 5))] == [(1, 0), (2, 0), (5, 2)]


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"priority": -1}, "priority"),
        ({"priority": 8}, "priority"),
    ],
)
def test_choices_and_priority_are_never_clamped(wrong: dict[str, int], field: str) -> None:
    call = Call("", TokenPrompt((1,)), SamplingParams(), **wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest) as caught:
        resolve(call, (1,), LIMITS, ROOMY, request_id="t-1", drawn_seed=77)
    assert caught.value.field == field


def test_priority_becomes_the_band() -> None:
    call = Call("", TokenPrompt((1,)), SamplingParams(), priority=7)
    assert resolve(call, (1,), LIMITS, ROOMY, request_id="t-1", drawn_seed=77).band == 7


@pytest.mark.parametrize("bad", [1000, 2**32 - 1, -1])
def test_id_outside_the_vocabulary_is_named_by_its_place(bad: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        _resolve((1, 2, bad, 3))
    assert caught.value.field == "prompt[2]"
    with pytest.raises(InvalidRequest) as caught:
        _resolve((1, 2), stop_token_ids=(5, 1000))
    assert caught.value.field == "stop_token_ids[1]"


def test_a_biased_id_outside_the_vocabulary_is_named() -> None:
    assert _resolve(3, logit_bias=((999, -100.0),)).sampling.logit_bias == ((999, -100.0),)
    with pytest.raises(InvalidRequest, match="logit_bias has id 1000, outside the vocabulary of 1000"):
        _resolve(3, logit_bias=((5, 1.0), (1000, 1.0)))


def test_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="at least one token"):
        _resolve(())


def test_min_tokens_counts_against_the_resolved_limit() -> None:
    assert _resolve(500, min_tokens=12).sampling.min_tokens == 12
    with pytest.raises(InvalidRequest, match=r"min_tokens \(13\) is above the 12"):
        _resolve(500, min_tokens=13)


def test_seed_is_drawn_only_when_missing() -> None:
    assert _resolve(3).sampling.seed == 77
    assert _resolve(3, seed=0).sampling.seed == 0
    assert _resolve(3, seed=-5).sampling.seed == -5


def test_model_may_be_left_out_but_not_wrong() -> None:
    assert _resolve(3).model == "tiny"
    assert _resolve(3, model="tiny").model == "tiny"
    with pytest.raises(UnknownModel):
        _resolve(3, model="other")


def test_capacity_is_of_one_live_worker_of_this_model() -> None:
    board = [
        _row("dead", blocks=999, lease_ms=0),
        _row("other", blocks=999, model="else"),
        _row("long", blocks=8, context=4096),
        _row("wide", blocks=64, context=512),
    ]
    assert capacity_of(board, "tiny") == Capacity(512, 1024, 16)
    assert capacity_of(board[:2], "tiny") is None


def test_price_counts_part_full_blocks() -> None:
    assert price_blocks(1, 15, 16) == 1
    assert price_blocks(1, 16, 16) == 2
    assert price_blocks(100, 28, 16) == 8


def test_price_counts_the_shared_prompt_once() -> None:
    assert price_blocks(64, 16, 16, 3) == 4 + 3
    assert price_blocks(65, 15, 16, 3) == 4 + 3, "the part full block of the prompt is each choice's own"
    assert price_blocks(65, 16, 16, 3) == 4 + 6


def test_expected_output_learns_and_stays_within_bounds() -> None:
    estimate = OutputEstimate()
    assert estimate.expected_tokens(_resolve(3, max_tokens=10)) == 10
    assert estimate.expected_tokens(_resolve(3, max_tokens=500)) == PRIOR_OUTPUT_TOKENS
    assert estimate.expected_tokens(_resolve(3, max_tokens=500, ignore_eos=True)) == 500
    for _ in range(200):
        estimate.finished(20)
    assert estimate.expected_tokens(_resolve(3, max_tokens=500)) == 20
    assert estimate.expected_tokens(_resolve(3, max_tokens=500, min_tokens=30)) == 30


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        (Refusal.TOO_LARGE, TooLong),
        (Refusal.WRONG_MODEL, UnknownModel),
        (Refusal.TENANT_CAP, Overloaded),
        (Refusal.GLOBAL_CAP, Overloaded),
        (Refusal.DEADLINE, Overloaded),
        (Refusal.NO_CAPACITY_KNOWN, Unavailable),
        (Refusal.STORE_FULL, Unavailable),
    ],
)
def test_every_refusal_of_the_store_has_an_error(reason: Refusal, kind: type[HeadraceError]) -> None:
    error = error_for(Refused(reason, limit=10, asked=20, retry_after_ms=2500))
    assert type(error) is kind
    helps_to_wait = reason not in (Refusal.TOO_LARGE, Refusal.WRONG_MODEL)
    assert error.retry_after_s == (2.5 if helps_to_wait else None)
