"""Whatever arrives, is cancelled, is cut or runs out of blocks: every request gets the answer it would have got
alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.frame import FinishReason
from tests.fixtures.scripted_runner import Client, ScriptedRunner, Ticks, bind, make_config, make_request, solo_output
from workers.engine import Engine
from workers.scheduler.capacity import capacity_names
from workers.scheduler.policy import policy_names

MAX_CONTEXT = 60
MAX_STEPS = 6_000
HOLDING = ("static", "dynamic")
"""Policies that may hold all work back for a while."""


@dataclass(frozen=True)
class Arrival:
    at_step: int
    prompt_tokens: int
    max_tokens: int
    min_tokens: int
    n: int
    band: int
    ignore_eos: bool
    cancel_at_step: int | None


arrivals = st.builds(
    Arrival,
    at_step=st.integers(0, 30),
    prompt_tokens=st.integers(1, 40),
    max_tokens=st.integers(3, 40),
    min_tokens=st.integers(0, 3),
    n=st.sampled_from((1, 1, 1, 2, 3)),
    band=st.integers(0, 2),
    ignore_eos=st.booleans(),
    cancel_at_step=st.none() | st.integers(0, 60),
)
configs = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(policy_names()),
        "capacity": st.sampled_from(capacity_names()),
        "itl_target_s": st.sampled_from((None, 0.004)),
        "block_size": st.sampled_from((1, 3, 4, 16)),
        "chunk_tokens": st.sampled_from((1, 2, 7, 16, 512)),
        "max_sequences": st.sampled_from((1, 2, 5, 64)),
    }
)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(arrivals, min_size=1, max_size=10),
    configs,
    st.integers(0, 60),
)
def test_any_load_ends_empty_with_the_solo_answers(
    script: list[Arrival], config: dict[str, object], spare_tokens: int
) -> None:
    block_size = int(str(config["block_size"]))
    num_blocks = -(-(MAX_CONTEXT + spare_tokens) // block_size)  # any one request fits, two may not
    runner = ScriptedRunner(num_blocks, block_size, max_context=MAX_CONTEXT)
    engine = Engine(runner, make_config(**config), None, Ticks())
    requests = [
        make_request(
            f"r{i}", a.prompt_tokens, a.max_tokens, min_tokens=a.min_tokens, ignore_eos=a.ignore_eos, n=a.n, band=a.band
        )
        for i, a in enumerate(script)
    ]
    client = Client()
    last_event = max(max(a.at_step, a.cancel_at_step or 0) for a in script)
    for step in range(MAX_STEPS):
        for request, arrival in zip(requests, script, strict=True):
            if arrival.at_step == step:
                engine.add(bind(request, inbox_id=f"{step}-{request.id[1:]}"))
            if arrival.cancel_at_step == step:
                engine.cancel(request.id, f"{step}-900")
        passes, before = len(runner.passes), engine.load()
        client.take(engine.step())
        load = engine.load()
        engine.check()
        assert load.free_blocks + load.cached_blocks + load.held_blocks == load.total_blocks
        assert 0 <= load.credit_blocks <= load.total_blocks
        if before.running + before.waiting and load.running + load.waiting:
            held = config["policy"] in HOLDING and load.running == 0
            assert len(runner.passes) == passes + 1 or held, "somebody waits and nothing was computed"
        if step >= last_event and load.running + load.waiting == 0:
            break
    assert (load.running, load.waiting, load.held_blocks) == (0, 0, 0)

    for request, arrival in zip(requests, script, strict=True):
        for choice in range(arrival.n):
            tokens, finish = client.answer(request.id, choice)
            expected, reason = solo_output(request, choice, max_context=MAX_CONTEXT)
            if finish is FinishReason.CANCELLED:
                assert arrival.cancel_at_step is not None
                assert tokens == expected[: len(tokens)]
            elif finish is None:  # cancelled before it arrived, or never: a cancel of an unknown request does nothing
                raise AssertionError(f"{request.id}/{choice} never ended")
            else:
                assert (tokens, finish) == (expected, reason)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 20),
    st.integers(1, 25),
    st.integers(0, 25),
    st.sampled_from(policy_names()),
    st.booleans(),
)
def test_a_journal_of_any_length_is_continued_exactly(
    prompt_tokens: int, max_tokens: int, journaled: int, policy: str, ignore_eos: bool
) -> None:
    request = make_request("moved", prompt_tokens, max_tokens, ignore_eos=ignore_eos)
    expected, reason = solo_output(request)
    journal = expected[:journaled]
    runner = ScriptedRunner(32, 4)
    engine = Engine(runner, make_config(policy=policy, chunk_tokens=8), None, Ticks())
    engine.add(bind(request, epoch=2, journal=(journal,)))
    parts = []
    for _ in range(1_000):  # of which the longest time-out of a batch takes the most
        frame = engine.step()
        parts.extend(frame.parts if frame else ())
        if parts and parts[-1].finish is not None:
            break
    assert engine.step() is None
    assert parts[0].first_index == len(journal)
    assert journal + tuple(token for part in parts for token in part.token_ids) == expected
    assert [part.finish for part in parts][-1] is reason
    assert all(part.finish is None for part in parts[:-1])
