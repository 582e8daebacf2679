"""Log probabilities: journaled and delivered with their tokens, by the same calls and the rule of the exact end."""

from __future__ import annotations

from dataclasses import replace

from headrace.frame import FinishReason, Part
from headrace.logprobs import UNTOLD, TokenLogprob
from tests.contract.store_pair import OTHER_WORKER, ROUTER, WORKER, StorePair, part

TOPS = 2


def of(token: int) -> TokenLogprob:
    """A log probability that only this token has; exact in 32 bits."""
    return TokenLogprob(-token / 8, token, ((token, -token / 8), (token + 1, -token / 4)))


def scored(request_id: str, first: int, *tokens: int, choice: int = 0, finish: FinishReason | None = None) -> Part:
    plain = part(request_id, first, *tokens, choice=choice, finish=finish)
    return replace(plain, logprobs=tuple(map(of, tokens)))


async def journaled(pair: StorePair, request_id: str, choice: int = 0, start: int = 0) -> tuple[TokenLogprob, ...]:
    return await pair.router.logprobs(request_id, choice, start, 99, TOPS)


async def test_they_go_with_their_tokens_into_journal_and_delivery(pair: StorePair) -> None:
    pair.report(WORKER)
    await pair.bound("q1", n=2)
    pair.report(WORKER, scored("q1", 0, 5), scored("q1", 0, 6, 7, choice=1))
    pair.report(WORKER, scored("q1", 1, 8, finish=FinishReason.STOP), scored("q1", 2, 9, choice=1))
    assert await journaled(pair, "q1") == (of(5), of(8))
    assert await journaled(pair, "q1", 1, start=1) == (of(7), of(9))
    assert await pair.router.logprobs("q1", 1, 1, 1, TOPS) == (of(7),)
    told = [(p.choice, p.token_ids, p.logprobs, p.finish) for p in await pair.delivered()]
    assert told == [
        (0, (5,), (of(5),), ""),
        (1, (6, 7), (of(6), of(7)), ""),
        (0, (8,), (of(8),), "stop"),
        (1, (9,), (of(9),), ""),
    ]


async def test_a_part_that_is_partly_known_brings_only_what_is_new(pair: StorePair) -> None:
    pair.report(WORKER)
    await pair.bound("q1")
    assert pair.report(WORKER, scored("q1", 2, 9)).resend == (("q1", 0, 0),)
    assert await journaled(pair, "q1") == ()
    pair.report(WORKER, scored("q1", 0, 5, 6))
    pair.report(WORKER, scored("q1", 0, 5, 6))
    pair.report(WORKER, scored("q1", 1, 6, 7, 8))
    assert await journaled(pair, "q1") == (of(5), of(6), of(7), of(8))
    told = [(p.first_index, p.token_ids, p.logprobs) for p in await pair.delivered()]
    assert told == [(0, (5, 6), (of(5), of(6))), (2, (7, 8), (of(7), of(8)))]


async def test_tokens_of_a_worker_that_tells_none_leave_a_hole_and_not_a_shift(pair: StorePair) -> None:
    pair.report(WORKER)
    await pair.bound("q1")
    pair.report(WORKER, part("q1", 0, 1, 2))
    assert await journaled(pair, "q1") == ()
    pair.report(WORKER, scored("q1", 2, 3))
    pair.report(WORKER, part("q1", 3, 4))
    assert await journaled(pair, "q1") == (UNTOLD, UNTOLD, of(3))
    assert [p.logprobs for p in await pair.delivered()] == [(), (of(3),), ()]


async def test_each_owner_gets_those_of_its_own_requests(pair: StorePair) -> None:
    pair.report(WORKER)
    await pair.bound("q1")
    await pair.bound("q2", router="second~1")
    await pair.bound("q3")
    pair.report(WORKER, scored("q1", 0, 5), scored("q2", 0, 6), part("q3", 0, 7))
    first, second = await pair.delivered(), await pair.delivered("second~1")
    assert [(p.request_id, p.logprobs) for p in first] == [("q1", (of(5),)), ("q3", ())]
    assert [(p.request_id, p.logprobs) for p in second] == [("q2", (of(6),))]


async def test_parts_of_another_epoch_bring_none(pair: StorePair) -> None:
    pair.report(WORKER)
    await pair.bound("q1")
    late = replace(scored("q1", 0, 5), epoch=2, prompt_logprobs=(UNTOLD, of(3)))
    assert pair.report(WORKER, late).dropped == ("q1",)
    assert await journaled(pair, "q1") == ()
    assert await pair.router.prompt_logprobs("q1", 2) == ()


async def test_the_prompts_are_kept_as_first_told_and_the_next_holder_knows(pair: StorePair) -> None:
    pair.report(WORKER)
    entry = await pair.bound("q1", prompt=3)
    assert entry.bound is not None
    assert not entry.bound.prompt_is_scored
    pair.report(WORKER, replace(scored("q1", 0, 5), prompt_logprobs=(UNTOLD, of(2), of(3))))
    pair.report(WORKER, replace(scored("q1", 1, 6), prompt_logprobs=(UNTOLD, of(7), of(8))))
    assert await pair.router.prompt_logprobs("q1", 3) == (UNTOLD, of(2), of(3))
    assert pair.link.release(WORKER, "q1", 1)
    pair.report(OTHER_WORKER)
    [again] = pair.link.inbox(OTHER_WORKER, "0-0", 0)
    assert again.bound is not None
    assert (again.bound.journal, again.bound.prompt_is_scored) == (((5, 6),), True)


async def test_a_next_holder_is_told_that_the_prompts_are_missing(pair: StorePair) -> None:
    """The first holder was of a release that tells none: tokens alone do not say that the prompt's are there."""
    pair.report(WORKER)
    await pair.bound("q1", prompt=2)
    pair.report(WORKER, part("q1", 0, 5))
    assert pair.link.release(WORKER, "q1", 1)
    pair.report(OTHER_WORKER)
    [again] = pair.link.inbox(OTHER_WORKER, "0-0", 0)
    assert again.bound is not None
    assert (again.bound.journal, again.bound.prompt_is_scored) == (((5,),), False)
    pair.report(OTHER_WORKER, replace(scored("q1", 1, 6), epoch=2, prompt_logprobs=(UNTOLD, of(2))))
    assert await pair.router.prompt_logprobs("q1", 2) == (UNTOLD, of(2))


async def test_they_live_as_long_as_the_request_and_no_longer(pair: StorePair) -> None:
    pair.report(WORKER)
    await pair.bound("q1", n=2, result_ttl_ms=1_000)
    last = replace(scored("q1", 0, 5, finish=FinishReason.STOP), prompt_logprobs=(UNTOLD,))
    pair.report(WORKER, last, scored("q1", 0, 6, choice=1, finish=FinishReason.STOP))
    assert await journaled(pair, "q1", 1) == (of(6),)
    audit = await pair.router.audit()
    assert (audit.ended, audit.stray_keys) == (1, 0)
    pair.wait(1_000)
    await pair.router.sweep(ROUTER)
    audit = await pair.router.audit()
    assert (audit.ended, audit.stray_keys) == (0, 0)
    assert await journaled(pair, "q1", 1) == ()
    assert await pair.router.prompt_logprobs("q1", 1) == ()


async def test_those_that_are_not_one_for_each_token_are_nobodys(pair: StorePair) -> None:
    pair.report(WORKER)
    await pair.bound("q1")
    pair.report(WORKER, replace(part("q1", 0, 5, 6), logprobs=(of(5),)))
    assert await pair.router.journal("q1", 0, 0) == (5, 6)
    assert await journaled(pair, "q1") == ()
