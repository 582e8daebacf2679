"""A machine whose passes take known times: what a long prompt does to those who are reading their answers."""

from __future__ import annotations

from collections.abc import Sequence

from tests.fixtures.scripted_runner import ScriptedRunner, bind, make_config, make_request
from workers.engine import Engine
from workers.kv.moves import Move
from workers.model.interface import Computed, SequenceSlice
from workers.scheduler.pace import MOST_AHEAD
from workers.scheduler.step_time import Features, StepTime, pass_of, warm_up_passes

ITL_S = 0.050


class Machine(ScriptedRunner):
    """4 ms a pass, 1 ms a decode, half a ms a prefill token, times `slowness`."""

    def __init__(self) -> None:
        super().__init__(600, 4)
        self.now = 0.0
        self.slowness = 1.0

    def clock(self) -> float:
        return self.now

    def duration_s(self, pass_: Features) -> float:
        return self.slowness * (0.004 + 0.001 * pass_.decode_rows + 0.0005 * pass_.prefill_tokens)

    def warmed_up(self) -> StepTime:
        step_time = StepTime()
        for pieces in warm_up_passes(512):
            step_time.measured(pass_of(pieces), self.duration_s(pass_of(pieces)))
        return step_time

    def forward(self, slices: Sequence[SequenceSlice], moves: Sequence[Move] = ()) -> tuple[Computed, ...]:
        self.now += self.duration_s(pass_of((piece.start, len(piece.token_ids)) for piece in slices))
        return super().forward(slices, moves)


def longest_gap_s(machine: Machine, step_time: StepTime, itl_target_s: float | None) -> tuple[float, float]:
    """Of two that talk while a third comes with 600 tokens: the longest gap between two of their tokens, and how long
    the third waits for its first.
    """
    engine = Engine(machine, make_config(chunk_tokens=512, itl_target_s=itl_target_s), None, machine.clock, step_time)
    for name in ("one", "two"):
        engine.add(bind(make_request(name, 40, 200, ignore_eos=True)))
    for _ in range(30):
        engine.step()
    engine.add(bind(make_request("reading", 600, 2, ignore_eos=True)))
    came_s = last_s = machine.now
    longest_s = 0.0
    while True:
        frame = engine.step()
        assert frame is not None
        names = {part.request_id for part in frame.parts}
        assert names >= {"one", "two"}, "the talking are in every step"
        longest_s, last_s = max(longest_s, machine.now - last_s), machine.now
        if "reading" in names:
            return longest_s, machine.now - came_s


def test_without_a_target_a_chunk_holds_them_up_as_long_as_it_takes() -> None:
    machine = Machine()
    assert longest_gap_s(machine, machine.warmed_up(), None)[0] > 5 * ITL_S


def test_with_a_target_the_gaps_keep_to_it_and_the_prompt_still_comes_through() -> None:
    machine = Machine()
    gap_s, first_token_s = longest_gap_s(machine, machine.warmed_up(), ITL_S)
    assert gap_s <= MOST_AHEAD * ITL_S
    assert first_token_s <= 1.25 * 600 * 0.0005, "what the target leaves is used"


def test_a_machine_that_has_become_slower_since_its_warm_up_is_measured_anew() -> None:
    machine = Machine()
    step_time = machine.warmed_up()
    machine.slowness = 1.5
    gap_s, _ = longest_gap_s(machine, step_time, ITL_S)
    assert gap_s <= 1.5 * MOST_AHEAD * ITL_S, "the first chunk after thirty decodes is planned by what they told"
    assert step_time.margin * step_time.predict_s(pass_of([(0, 100)])) > 1.2 * 0.054, "then the chunks themselves tell"


def test_without_a_warm_up_the_first_passes_teach_enough() -> None:
    assert longest_gap_s(Machine(), StepTime(), ITL_S)[0] <= 1.1 * MOST_AHEAD * ITL_S
