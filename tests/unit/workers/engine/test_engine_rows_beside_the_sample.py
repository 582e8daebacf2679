"""Rows that are computed beside those sampled from: padding, and prompt tokens whose likelihood is asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from headrace.frame import Part
from headrace.logprobs import TokenLogprob
from tests.fixtures.scripted_runner import Client, ScriptedRunner, Ticks, bind, make_config, make_request, solo_output
from workers.engine import Engine
from workers.kv.moves import Move
from workers.model.interface import Computed, SequenceSlice
from workers.scheduler.policy import Chunked
from workers.scheduler.state import SchedulerState, StepPlan


class Padded(Chunked):
    """Adds a slice of five rows and one of a single row to every step."""

    def plan(self, state: SchedulerState, now: float) -> StepPlan:
        return replace(super().plan(state, now), padding=(5, 1))


def test_padding_is_computed_and_changes_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.engine.make_policy", lambda _: Padded())
    runner = ScriptedRunner(64, 4)
    engine = Engine(runner, make_config(), None, Ticks())
    requests = [make_request(name, 7, 9, ignore_eos=True) for name in ("a", "bb")]
    for request in requests:
        engine.add(bind(request))
    client = Client()
    while frame := engine.step():
        client.take(frame)
        engine.check()
    for request in requests:
        assert client.answer(request.id) == solo_output(request)
    assert all(sum(len(piece.token_ids) for piece in slices[-2:]) == 6 for slices in runner.passes)
    assert all(set(piece.block_ids) == {64} for slices in runner.passes for piece in slices[-2:])


class Scoring(ScriptedRunner):
    """Says of every scored token that its log probability is minus itself."""

    def forward(self, slices: Sequence[SequenceSlice], moves: Sequence[Move] = ()) -> tuple[Computed, ...]:
        results = super().forward(slices, moves)
        return tuple(
            replace(
                given,
                scores=tuple(TokenLogprob(-float(t), 1) for t in piece.score.targets) if piece.score else (),
                sampled=given.sampled and replace(given.sampled, logprob=TokenLogprob(-0.5, 1)),
            )
            for piece, given in zip(slices, results, strict=True)
        )


@pytest.mark.parametrize(("num_blocks", "chunk_tokens"), [(64, 512), (64, 3), (8, 5)])
def test_every_token_has_its_logprob_once_whatever_the_chunks(num_blocks: int, chunk_tokens: int) -> None:
    """The smallest pool cannot hold both to their ends, and an estimate taught by short outputs starts both."""
    engine = Engine(Scoring(num_blocks, 4, eos_token_ids=()), make_config(chunk_tokens=chunk_tokens), None, Ticks())
    for i in range(20):
        engine.add(bind(make_request(f"quick{i}", 1, 1)))
    while engine.step():
        pass
    stop = (0,)  # may end them, so that their length is not known beforehand
    requests = [make_request(name, 10, 12, stop_token_ids=stop, logprobs=0, prompt_logprobs=0) for name in ("a", "bb")]
    for request in requests:
        engine.add(bind(request))
    parts: dict[str, list[Part]] = {}
    while frame := engine.step():
        for part in frame.parts:
            parts.setdefault(part.request_id, []).append(part)
    assert (engine.load().preemptions_total > 0) == (num_blocks == 8)
    for request in requests:
        told = parts[request.id]
        assert all(len(part.logprobs) == len(part.token_ids) for part in told)
        assert not any(part.prompt_logprobs for part in told[1:])
        first, *rest = told[0].prompt_logprobs
        assert math.isnan(first.logprob)
        assert [-score.logprob for score in rest] == list(request.prompt_token_ids[1:])
