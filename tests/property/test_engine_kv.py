"""Requests that share beginnings, on pools that are too small for them: whatever is cached, evicted, brought back,
copied, preempted or spoilt, every request gets the answer it would have got alone, and every block is given back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.frame import FinishReason
from headrace.request import Request
from headrace.sampling import SamplingParams
from tests.fixtures.scripted_runner import Client, ScriptedRunner, Ticks, bind, make_config, solo_output
from workers.engine import Engine
from workers.model.interface import Sampled, SequenceSlice

MAX_CONTEXT = 48
MAX_STEPS = 4_000
SPOILT_SEED = 13


@dataclass(frozen=True)
class Arrival:
    at_step: int
    beginning: int
    """Which of a few long texts its prompt starts with …"""
    shared_tokens: int
    own_tokens: int
    """… and how many tokens of its own follow."""
    max_tokens: int
    n: int
    band: int
    tenant: str
    scored: bool
    spoilt_at: int | None
    """The token at which its logits are not numbers."""
    cancel_at_step: int | None


arrivals = st.builds(
    Arrival,
    at_step=st.integers(0, 25),
    beginning=st.integers(0, 1),
    shared_tokens=st.integers(1, 28),
    own_tokens=st.integers(0, 3),
    max_tokens=st.integers(1, 16),
    n=st.sampled_from((1, 1, 2, 3)),
    band=st.integers(0, 1),
    tenant=st.sampled_from(("a", "a", "a", "b")),
    scored=st.sampled_from((False, False, False, True)),
    spoilt_at=st.sampled_from((None, None, None, 0, 3)),
    cancel_at_step=st.sampled_from((None, None, 2, 9, 30)),
)
configs = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(("chunked", "chunked", "continuous")),
        "capacity": st.sampled_from(("over-commit", "over-commit", "no-evict")),
        "block_size": st.sampled_from((1, 3, 4, 8)),
        "chunk_tokens": st.sampled_from((1, 5, 16, 512)),
        "max_sequences": st.sampled_from((2, 5, 64)),
        "prefix_cache": st.sampled_from((True, True, True, False)),
    }
)


def request_of(name: str, arrival: Arrival) -> Request:
    shared = [(3 + 7 * i + arrival.beginning * (i + 1)) % 61 for i in range(arrival.shared_tokens)]
    own = [(len(name) * 11 + sum(name.encode()) + i) % 61 for i in range(arrival.own_tokens)]
    sampling = SamplingParams(
        max_tokens=arrival.max_tokens,
        temperature=0.0,
        seed=SPOILT_SEED if arrival.spoilt_at is not None else 7,
        prompt_logprobs=0 if arrival.scored else None,
    )
    return Request(name, "scripted", (*shared, *own), sampling, arrival.tenant, arrival.band, arrival.n)


def spoil(script: list[Arrival]) -> Callable[[int, SequenceSlice, Sampled], Sampled]:
    places = {arrival.spoilt_at for arrival in script if arrival.spoilt_at is not None}

    def disturb(_: int, piece: SequenceSlice, sampled: Sampled) -> Sampled:
        spec = piece.sample
        if spec is not None and spec.seed == SPOILT_SEED and spec.token_index in places:
            return replace(sampled, fault="the logits are not numbers")
        return sampled

    return disturb


@settings(max_examples=100, deadline=None)
@given(st.lists(arrivals, min_size=2, max_size=10), configs, st.integers(0, 40), st.sampled_from((0, 0, 3, 20)))
def test_shared_beginnings_change_no_answer(
    script: list[Arrival], config: dict[str, object], spare_tokens: int, host_blocks: int
) -> None:
    block_size = int(str(config["block_size"]))
    num_blocks = -(-(MAX_CONTEXT + spare_tokens) // block_size)  # any one request fits, few together do
    runner = ScriptedRunner(
        num_blocks,
        block_size,
        max_context=MAX_CONTEXT,
        host_blocks=host_blocks,
        disturb=spoil(script),
    )
    engine = Engine(runner, make_config(**config), None, Ticks())
    requests = [request_of(f"r{i}", arrival) for i, arrival in enumerate(script)]
    client = Client()
    last_event = max(max(a.at_step, a.cancel_at_step or 0) for a in script)
    load = engine.load()
    for step in range(MAX_STEPS):
        for request, arrival in zip(requests, script, strict=True):
            if arrival.at_step == step:
                engine.add(bind(request, inbox_id=f"{step}-{request.id[1:]}"))
            if arrival.cancel_at_step == step:
                engine.cancel(request.id, f"{step}-900")
        passes, before = len(runner.passes), load
        client.take(engine.step())
        load = engine.load()
        engine.check()
        for waiting in engine._roster.state.waiting:
            generation = engine._roster[waiting.key]
            assert engine._roster.holdings.awaits_its_prefix(generation) is engine._roster.hit_of(waiting).pending
        assert load.free_blocks + load.cached_blocks + load.held_blocks == load.total_blocks
        assert 0 <= load.credit_blocks <= load.total_blocks
        if before.running + before.waiting and load.running + load.waiting:
            assert len(runner.passes) == passes + 1, "somebody waits and nothing was computed"
        if step >= last_event and load.running + load.waiting == 0:
            break
    assert (load.running, load.waiting, load.held_blocks) == (0, 0, 0)
    assert config["prefix_cache"] or load.cached_blocks == 0
    for request, arrival in zip(requests, script, strict=True):
        _compare(client, request, arrival)


def _compare(client: Client, request: Request, arrival: Arrival) -> None:
    spoilt = arrival.spoilt_at is not None
    for choice in range(arrival.n):
        tokens, finish = client.answer(request.id, choice)
        expected, reason = solo_output(request, choice, max_context=MAX_CONTEXT)
        assert finish is not None, f"{request.id}/{choice} never ended"
        if finish is FinishReason.CANCELLED:
            assert arrival.cancel_at_step is not None
            assert tokens == expected[: len(tokens)]
        elif finish is FinishReason.FAILED:
            assert spoilt, client.details[request.id, choice]
            assert tokens == expected[: len(tokens)]
        else:
            assert (tokens, finish) == (expected, reason)
