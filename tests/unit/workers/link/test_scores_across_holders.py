"""Log probabilities of a request whose worker dies: none lost, none told twice, each with its own token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from headrace.frame import FinishReason, Frame, Part
from headrace.logprobs import UNTOLD, TokenLogprob
from headrace.store.interface import Admit, Admitted, Reported, State
from headrace.store.twin import Twin
from headrace.store.twin_store import SyncTwinStore, TwinStore
from tests.fixtures.scripted_runner import ScriptedRunner, make_config, make_request, solo_output
from workers.engine import Engine
from workers.kv.moves import Move
from workers.link import Link
from workers.model.interface import Computed, SequenceSlice

OUTPUT = 6


def of(token: int) -> TokenLogprob:
    return TokenLogprob(-float(token), token + 1)


class Scoring(ScriptedRunner):
    """Says of every token that its log probability is minus itself."""

    def forward(self, slices: Sequence[SequenceSlice], moves: Sequence[Move] = ()) -> tuple[Computed, ...]:
        results = super().forward(slices, moves)
        return tuple(
            Computed(
                given.sampled and replace(given.sampled, logprob=of(given.sampled.token_id)),
                tuple(of(target) for target in piece.score.targets) if piece.score else (),
            )
            for piece, given in zip(slices, results, strict=True)
        )


@dataclass
class Holder:
    """One worker without threads: the test makes its steps and its reports."""

    engine: Engine
    link: Link
    store: SyncTwinStore
    read_to: str = "0-0"

    def beat(self) -> None:
        assert self.link._report(self.engine.beat())

    def run(self, most: int = 99) -> list[Part]:
        """At most so many iterations, each reported and kept; what they told."""
        for entry in self.store.inbox(self.link.incarnation, self.read_to, 0):
            self.link._take(entry)
            self.read_to = entry.id
        told: list[Part] = []
        while most and (frame := self.engine.step()) is not None:
            assert self.link._report(frame)
            self.link._keep(frame)
            told += frame.parts
            most -= 1
        return told


def holder(twin: Twin, name: str, runner: ScriptedRunner) -> Holder:
    engine, store = Engine(runner, make_config(prefix_cache=False), None), SyncTwinStore(twin)
    made = Holder(engine, Link(engine, store, SyncTwinStore(twin), lambda: f"{name}~1"), store)
    made.beat()
    return made


@pytest.fixture
def twin() -> Twin:
    return Twin("cluster", "scripted", lambda: 1_760_000_000_000)


REQUEST = replace(make_request("a", 7, OUTPUT, ignore_eos=True, logprobs=0, prompt_logprobs=0), n=2)
OUTPUTS = [solo_output(REQUEST, choice)[0] for choice in range(2)]
PROMPT_SCORES = (UNTOLD, *map(of, REQUEST.prompt_token_ids[1:]))


async def admit(twin: Twin) -> TwinStore:
    router = TwinStore(twin)
    assert isinstance(await router.admit(Admit(REQUEST, "router~1", ("one~1",), price_blocks=8)), Admitted)
    return router


@pytest.mark.parametrize("iterations", range(5))
async def test_the_next_holder_tells_the_rest_and_only_the_rest(twin: Twin, iterations: int) -> None:
    one = holder(twin, "one", Scoring(64, 4))
    router = await admit(twin)
    first = one.run(iterations)
    two = holder(twin, "two", Scoring(64, 4))
    one.store.leave("one~1")
    second = two.run()
    status = await router.status("a")
    assert status is not None
    assert (status.state, status.worker) == (State.FINISHED, "")
    for choice, output in enumerate(OUTPUTS):
        assert await router.journal("a", choice, 0) == output
        assert await router.logprobs("a", choice, 0, 99, 0) == tuple(map(of, output))
        parts = [part for part in first + second if part.choice == choice]
        assert [token for part in parts for token in part.token_ids] == list(output)
        assert [score for part in parts for score in part.logprobs] == list(map(of, output))
    assert await router.prompt_logprobs("a", 7) == PROMPT_SCORES
    assert sum(bool(part.prompt_logprobs) for part in first + second) == 1


async def test_the_next_holder_tells_the_prompts_that_the_first_did_not(twin: Twin) -> None:
    one = holder(twin, "one", ScriptedRunner(64, 4))
    router = await admit(twin)
    bare = [replace(part, prompt_logprobs=()) for part in _steps(one, 3)]
    assert one.link._report(Frame(one.engine.load(), tuple(bare[:2]), one.read_to))
    two = holder(twin, "two", Scoring(64, 4))
    one.store.leave("one~1")
    two.run()
    assert await router.prompt_logprobs("a", 7) == PROMPT_SCORES
    for choice, output in enumerate(OUTPUTS):
        scores = await router.logprobs("a", choice, 0, 99, 0)
        assert scores == (UNTOLD, *map(of, output[1:]))


def _steps(one: Holder, count: int) -> list[Part]:
    """Computed and never reported."""
    for entry in one.store.inbox(one.link.incarnation, one.read_to, 0):
        one.link._take(entry)
        one.read_to = entry.id
    frames = [one.engine.step() for _ in range(count)]
    return [part for frame in frames if frame is not None for part in frame.parts]


@pytest.mark.parametrize("lost", range(1, OUTPUT))
async def test_what_the_store_lost_is_sent_again_with_its_scores(
    twin: Twin, lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last `lost` reports are gone when the next comes, as after a kill of the server; one choice has ended."""
    one = holder(twin, "one", Scoring(64, 4))
    router = await admit(twin)
    one.run(0)
    report = one.store.report
    reports = 0

    def forgetful(worker: str, frame: Frame) -> Reported:
        nonlocal reports
        reports += bool(frame.parts)
        kept = (
            frame if not frame.parts or reports <= OUTPUT - 1 - lost or reports >= OUTPUT else replace(frame, parts=())
        )
        return report(worker, kept)

    monkeypatch.setattr(one.store, "report", forgetful)
    frames = [one.engine.step() for _ in range(OUTPUT)]
    for frame in frames:
        assert frame is not None
        frame = replace(frame, parts=_choice_1_ends_early(frame.parts))
        assert one.link._report(frame)
        one.link._keep(frame)
    status = await router.status("a")
    assert status is not None
    assert (status.state, status.finishes) == (State.FINISHED, ("length", "stop"))
    for choice, output in enumerate((OUTPUTS[0], OUTPUTS[1][: OUTPUT - 1])):
        assert await router.journal("a", choice, 0) == output
        assert await router.logprobs("a", choice, 0, 99, 0) == tuple(map(of, output))
    assert await router.prompt_logprobs("a", 7) == PROMPT_SCORES


def _choice_1_ends_early(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """With its last token but one; so its end is among what is lost, and no later part of it comes."""
    told = [
        replace(part, finish=FinishReason.STOP) if part.choice == 1 and part.first_index == OUTPUT - 2 else part
        for part in parts
    ]
    return tuple(part for part in told if not (part.choice == 1 and part.first_index == OUTPUT - 1))
