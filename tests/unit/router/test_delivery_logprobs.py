"""Log probabilities with each token once and in order, the prompt's before them, and the best of several choices."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field, replace

import pytest

from headrace.events import Accepted, Delta, Event, Finished, PromptLogprobs
from headrace.frame import FinishReason, Frame, LoadReport, Part
from headrace.logprobs import UNTOLD, TokenLogprob
from headrace.request import Request
from headrace.sampling import SamplingParams
from headrace.store.interface import Admit, Admitted
from headrace.store.twin import Twin
from headrace.store.twin_store import SyncTwinStore, TwinStore
from headrace.tokenizer import Tokenizer
from router.delivery.hub import Delivery
from router.delivery.stream import RequestStream

WORKER, MODEL, PROMPT = "worker~1", "reciter", (5, 6, 7)
PROMPT_LOGPROBS = (UNTOLD, TokenLogprob(-1.5, 2, ((3, -0.5),)), TokenLogprob(-0.25, 1, ((7, -0.25),)))
LOAD = LoadReport(
    seq=0, credit_blocks=100, free_slots=8, free_blocks=100, cached_blocks=0, held_blocks=0, total_blocks=128,
    block_size=16, max_context=1024, running=0, waiting=0, uncomputed_tokens=0, step_s=0.05, drain_tokens_per_s=100.0,
    iterations=1, prompt_tokens_total=0, output_tokens_total=0, preemptions_total=0, draining=False, model=MODEL,
    weight_version="v1", numerics="cpu",
)  # fmt: skip


def of(token: int) -> TokenLogprob:
    return TokenLogprob(-token / 64, token + 1, ((token, -token / 64),))


@dataclass
class Bench:
    """A router's delivery that is told what it gets, over a store whose worker is the test."""

    store: TwinStore
    worker: SyncTwinStore
    delivery: Delivery
    observed: list[Delta | Finished] = field(default_factory=list)
    seq: int = 0
    read_to: str = "0-0"

    def report(self, *parts: Part) -> None:
        self.seq += 1
        assert self.worker.report(WORKER, Frame(replace(LOAD, seq=self.seq), parts, "")).resend == ()

    async def open(self, *, n: int = 1, best: int = 0, **sampling: int) -> RequestStream:
        self.report()
        params = SamplingParams(max_tokens=50, seed=1, **sampling)
        request = Request("q1", MODEL, PROMPT, params, n=n, best=best)
        stream = self.delivery.open(request, self.observed.extend, lambda _: None)
        router = self.delivery.membership.router
        assert isinstance(await self.store.admit(Admit(request, router, (WORKER,), price_blocks=2)), Admitted)
        self.delivery.accepted(stream, router, len(PROMPT))
        return stream

    async def deliver(self, *, lose: float = 0.0, draw: random.Random | None = None) -> None:
        """What came since last time, in part lost; then whatever delivery goes to look up."""
        for entry in await self.store.deliveries(self.delivery.membership.router, self.read_to, 0):
            self.read_to = entry.id
            if draw is None or draw.random() >= lose:
                self.delivery._deliver(entry)
        await self.look_up()

    async def look_up(self) -> None:
        await asyncio.gather(*self.delivery._tasks)

    async def reconcile(self, stream: RequestStream) -> None:
        self.delivery._catch_up_soon(stream)
        await self.look_up()


def fresh(tokenizer: Tokenizer) -> Bench:
    twin = Twin("test", MODEL, lambda: 1_760_000_000_000)
    store = TwinStore(twin)
    return Bench(store, SyncTwinStore(twin), Delivery(store, "router", tokenizer))


@pytest.fixture
def bench(tokenizer: Tokenizer) -> Bench:
    return fresh(tokenizer)


def part(first: int, *tokens: int, choice: int = 0, finish: FinishReason | None = None) -> Part:
    return Part("q1", choice, 1, first, tokens, finish, logprobs=tuple(map(of, tokens)))


async def events_of(stream: RequestStream) -> list[Event]:
    return [event async for event in stream]


def joined(events: list[Event], choice: int) -> tuple[list[int], list[TokenLogprob]]:
    deltas = [event for event in events if isinstance(event, Delta) and event.choice == choice]
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    for delta in deltas:
        assert delta.first_index == len(tokens)
        assert len(delta.logprobs) == len(delta.token_ids)
        tokens += delta.token_ids
        logprobs += delta.logprobs
    return tokens, logprobs


async def test_whatever_is_lost_each_token_brings_its_own_once_and_in_order(tokenizer: Tokenizer) -> None:
    for seed in range(60):
        draw = random.Random(seed)
        bench = fresh(tokenizer)
        stream = await bench.open(n=2, logprobs=1)
        outputs = [[draw.randrange(60) for _ in range(draw.randrange(1, 12))] for _ in range(2)]
        told = [0, 0]
        while any(told[c] < len(outputs[c]) for c in range(2)):
            parts = []
            for choice in range(2):
                first, rest = told[choice], len(outputs[choice]) - told[choice]
                count = min(rest, draw.choice((0, 1, 1, 2)))
                if count:
                    finish = FinishReason.LENGTH if count == rest else None
                    parts.append(part(first, *outputs[choice][first : first + count], choice=choice, finish=finish))
                    told[choice] += count
            bench.report(*parts)
            if draw.random() < 0.6:
                await bench.deliver(lose=0.4, draw=draw)
        await bench.deliver(lose=0.4, draw=draw)
        await bench.reconcile(stream)
        events = await events_of(stream)
        for choice in range(2):
            tokens, logprobs = joined(events, choice)
            assert tokens == outputs[choice], seed
            assert logprobs == [of(token) for token in tokens], seed


async def test_tokens_of_a_worker_that_tells_none_stay_untold(bench: Bench) -> None:
    stream = await bench.open(logprobs=1)
    bench.report(replace(part(0, 9, 8), logprobs=()))
    await bench.deliver()
    bench.report(part(2, 7))
    await bench.reconcile(stream)
    bench.report(replace(part(3, 6, finish=FinishReason.STOP), logprobs=()))
    await bench.reconcile(stream)
    assert joined(await events_of(stream), 0) == ([9, 8, 7, 6], [UNTOLD, UNTOLD, of(7), UNTOLD])


async def test_who_asked_for_none_gets_none(bench: Bench) -> None:
    stream = await bench.open()
    bench.report(part(0, 9, finish=FinishReason.STOP))
    await bench.deliver()
    deltas = [event for event in await events_of(stream) if isinstance(event, Delta)]
    assert [delta.logprobs for delta in deltas] == [()]


@pytest.mark.parametrize("choice_first", [0, 1])
@pytest.mark.parametrize("is_lost", [False, True])
async def test_the_prompts_come_once_and_before_every_delta(bench: Bench, choice_first: int, is_lost: bool) -> None:
    stream = await bench.open(n=2, prompt_logprobs=1, logprobs=1)
    parts = [replace(part(0, 9), prompt_logprobs=PROMPT_LOGPROBS), part(0, 8, choice=1)]
    for turn in (choice_first, 1 - choice_first):
        bench.report(parts[turn])
        if not is_lost:
            await bench.deliver()
    await bench.reconcile(stream)
    bench.report(part(1, choice=0, finish=FinishReason.STOP), part(1, 7, choice=1, finish=FinishReason.STOP))
    await bench.deliver()
    events = await events_of(stream)
    assert events[:2] == [Accepted("q1", 3), PromptLogprobs(PROMPT, PROMPT_LOGPROBS)]
    assert sum(isinstance(event, PromptLogprobs) for event in events) == 1
    assert joined(events, 0) == ([9], [of(9)])
    assert joined(events, 1) == ([8, 7], [of(8), of(7)])
    assert not any(isinstance(event, PromptLogprobs) for event in bench.observed)


async def test_output_does_not_wait_for_prompts_that_nobody_tells(bench: Bench) -> None:
    stream = await bench.open(prompt_logprobs=0)
    bench.report(part(0, 9))
    await bench.deliver()
    assert [await anext(stream), await anext(stream)] == [Accepted("q1", 3), Delta(0, 0, (9,), "*")]
    bench.report(part(1, 8, finish=FinishReason.STOP))
    await bench.deliver()
    assert isinstance((await events_of(stream))[-1], Finished)


async def test_a_request_that_ends_before_its_first_token_ends_its_stream(bench: Bench) -> None:
    stream = await bench.open(n=2, prompt_logprobs=0)
    await bench.store.cancel("q1")
    bench.report(*(part(0, choice=choice, finish=FinishReason.CANCELLED) for choice in range(2)))
    await bench.deliver()
    ends = [(e.choice, e.reason) for e in await events_of(stream) if isinstance(e, Finished)]
    assert ends == [(0, FinishReason.CANCELLED), (1, FinishReason.CANCELLED)]


@pytest.mark.parametrize("asked", [{}, {"logprobs": 1}])
@pytest.mark.parametrize("is_lost", [False, True])
async def test_the_likeliest_are_shown_when_all_have_ended(bench: Bench, asked: dict[str, int], is_lost: bool) -> None:
    stream = await bench.open(n=3, best=2, **asked)

    async def told(*parts: Part) -> None:
        bare = [replace(p, logprobs=tuple(replace(one, top=()) for one in p.logprobs)) for p in parts]
        bench.report(*(parts if asked else bare))
        if not is_lost:
            await bench.deliver()

    await told(part(0, 40), part(0, 20, choice=1), part(0, 30, choice=2))
    await told(part(1, 1, finish=FinishReason.STOP), part(1, 2, choice=1, finish=FinishReason.LENGTH))
    await bench.reconcile(stream)
    assert bench.observed == []
    await told(part(1, 3, choice=2, finish=FinishReason.STOP))
    await bench.reconcile(stream)
    shown = (await events_of(stream))[1:]
    assert shown == bench.observed
    assert [(e.choice, e.token_ids) for e in shown if isinstance(e, Delta)] == [(0, (20, 2)), (1, (30, 3))]
    ends = [(e.choice, e.reason, e.completion_tokens) for e in shown if isinstance(e, Finished)]
    assert ends == [(0, FinishReason.LENGTH, 2), (1, FinishReason.STOP, 2)]
    logprobs = [e.logprobs for e in shown if isinstance(e, Delta)]
    assert logprobs == ([(of(20), of(2)), (of(30), of(3))] if asked else [(), ()])


@pytest.mark.parametrize("best", [0, 1])
@pytest.mark.parametrize("is_lost", [False, True])
async def test_what_waits_stays_below_what_a_message_carries(
    bench: Bench, best: int, is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a slow reader, of choices that are held back, and of a journal that is read at once."""
    monkeypatch.setattr("router.delivery.merging.MAX_SCORED_TOKENS", 4)
    stream = await bench.open(n=2, best=best, logprobs=1)
    for first in range(0, 9, 3):
        ends = FinishReason.STOP if first == 6 else None
        tokens = range(first, first + 3)
        bench.report(*(part(first, *tokens, choice=choice, finish=ends) for choice in range(2)))
        if not is_lost:
            await bench.deliver()
    await bench.reconcile(stream)
    events = await events_of(stream)
    sizes = [len(event.logprobs) for event in events if isinstance(event, Delta) and event.choice == 0]
    assert sizes == ([4, 4, 1] if is_lost else [3, 3, 3])
    assert joined(events, 0) == (list(range(9)), [of(token) for token in range(9)])
