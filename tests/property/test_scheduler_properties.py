"""What the scheduler promises, whatever comes when, is cancelled, runs out of time or of blocks; for every policy and
every capacity, judged plan by plan from between engine and policy.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.fixtures.scripted_runner import Client, ScriptedRunner, bind, make_config, make_request
from workers.engine import Engine
from workers.scheduler import draft, estimate
from workers.scheduler import sequence as of_sequences
from workers.scheduler.capacity import capacity_names
from workers.scheduler.peak import Growth
from workers.scheduler.policy import Policy, policy_names
from workers.scheduler.sequence import Sequence, SequenceKey
from workers.scheduler.state import SchedulerState, StepPlan, Wait

MAX_CONTEXT = 60
MAX_STEPS = 2_000
STEP_S = 0.01
MOST_OVERTAKES = 3
"""In place of 32, so that a dozen requests can reach it."""
MOST_PREEMPTIONS = 1
"""In place of 2, for the same reason."""
HOPED_TOKENS = 4
"""In place of 256: the first estimates are far too low, so that blocks run out."""


@dataclass(frozen=True)
class Arrival:
    at_step: int
    prompt_tokens: int
    max_tokens: int
    band: int
    ignore_eos: bool
    time_left_s: float | None
    """It is cancelled so long after it came."""


@contextmanager
def _low_bounds() -> Iterator[None]:
    with (
        patch.object(draft, "MAX_OVERTAKES", MOST_OVERTAKES),
        patch.object(of_sequences, "MOST_PREEMPTIONS_IN_A_ROW", MOST_PREEMPTIONS),
    ):
        yield


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


class Judge:
    """A policy that answers as another one does, once it has looked at the answer."""

    def __init__(self, policy: Policy, *, name: str, capacity: str) -> None:
        self._policy = policy
        self._never_preempts = capacity == "no-evict"
        self._iterative = name in ("chunked", "continuous")
        self._cuts = name == "chunked"
        self.queued_since: dict[SequenceKey, float] = {}
        self.queued_ns = 0
        self.wake_at_s: float | None = None
        self.preempted = self.backfilled = 0
        self.most_preempted = self.most_overtaken = 0

    def plan(self, state: SchedulerState, now: float) -> StepPlan:
        plan = self._policy.plan(state, now)
        self.wake_at_s = None if plan.work else plan.wake_at_s
        self._somebody_advances(state, plan, now)
        self._limits_hold(state, plan)
        self._preemption_is_bounded(state, plan)
        self._every_wait_has_one_reason(state, plan)
        if self._iterative:
            self._nobody_is_passed_too_often(state, plan)
            self._backfill_delays_no_head(state, plan)
        self._note_queue_times(plan, now)
        return plan

    def _somebody_advances(self, state: SchedulerState, plan: StepPlan, now: float) -> None:
        assert not plan.unfit, "every request of this test fits the pool"
        if state.running:
            assert plan.work
        elif state.waiting and not plan.work:
            assert plan.wake_at_s is not None
            assert plan.wake_at_s > now

    def _limits_hold(self, state: SchedulerState, plan: StepPlan) -> None:
        running = {sequence.key for sequence in state.running} - set(plan.preempted) | set(plan.admitted)
        assert len(running) <= state.limits.max_sequences
        assert {work.key for work in plan.work} <= running
        assert len({work.key for work in plan.work}) == len(plan.work)
        if self._cuts:
            assert plan.tokens <= state.limits.chunk_tokens
        by_key = {sequence.key: sequence for sequence in (*state.running, *state.waiting)}
        for work in plan.work:
            assert work.start == by_key[work.key].computed
            assert 0 < work.count <= by_key[work.key].gap

    def _preemption_is_bounded(self, state: SchedulerState, plan: StepPlan) -> None:
        self.preempted += len(plan.preempted)
        assert not (self._never_preempts and plan.preempted)
        assert not plan.preempted or len(plan.preempted) < len(state.running), "the last survivor stays"
        assert not (plan.preempted and plan.admitted)
        for sequence in (*state.running, *state.waiting):
            self.most_preempted = max(self.most_preempted, sequence.preempted_in_a_row)
        assert self.most_preempted <= MOST_PREEMPTIONS

    def _every_wait_has_one_reason(self, state: SchedulerState, plan: StepPlan) -> None:
        left = {sequence.key for sequence in state.waiting} - set(plan.admitted) | set(plan.preempted)
        assert [key for key, _ in plan.waits] == list(dict(plan.waits))
        assert set(dict(plan.waits)) == left

    def _nobody_is_passed_too_often(self, state: SchedulerState, plan: StepPlan) -> None:
        """The stated bound: a waiting sequence waits for those before it, and for so many behind it."""
        for sequence in state.waiting:
            if sequence.key not in plan.admitted:
                passed = sum(other.key in plan.admitted and other.place > sequence.place for other in state.waiting)
                self.most_overtaken = max(self.most_overtaken, sequence.overtaken + passed)
        assert self.most_overtaken <= MOST_OVERTAKES

    def _backfill_delays_no_head(self, state: SchedulerState, plan: StepPlan) -> None:
        blocked = [key for key, reason in plan.waits if reason is Wait.BLOCKS]
        head = next((sequence for sequence in state.waiting if sequence.key in blocked), None)
        if head is None or plan.preempted:
            return
        started = [sequence for sequence in state.waiting if sequence.key in plan.admitted]
        before = [*state.running, *(sequence for sequence in started if sequence.place < head.place)]
        behind = [sequence for sequence in started if sequence.place > head.place]
        self.backfilled += len(behind)
        assert _start_of(head, [*before, *behind], state) <= _start_of(head, before, state)

    def _note_queue_times(self, plan: StepPlan, now: float) -> None:
        for key in plan.admitted:
            self.leaves(key, now)
        self.queued_since.update(dict.fromkeys(plan.preempted, now))

    def leaves(self, key: SequenceKey, now: float) -> None:
        if key in self.queued_since:
            self.queued_ns += round(now * 1e9) - round(self.queued_since.pop(key) * 1e9)


def _start_of(head: Sequence, running: list[Sequence], state: SchedulerState) -> int:
    growths: list[Growth] = sorted(state.growth_of(sequence) for sequence in running)
    limits = state.limits
    return state.capacity.earliest_start(growths, state.growth_of(head), limits.block_size, limits.total_blocks)


arrivals = st.builds(
    Arrival,
    at_step=st.integers(0, 25),
    prompt_tokens=st.integers(1, 30),
    max_tokens=st.integers(1, 40),
    band=st.integers(0, 3),
    ignore_eos=st.sampled_from((False, False, True)),
    time_left_s=st.none() | st.none() | st.floats(0.0, 0.4),
)


@settings(max_examples=100, deadline=None)
@given(
    script=st.lists(arrivals, min_size=1, max_size=16),
    policy=st.sampled_from(policy_names()),
    capacity=st.sampled_from(capacity_names()),
    block_size=st.sampled_from((1, 3, 4, 16)),
    chunk_tokens=st.sampled_from((2, 7, 16, 512)),
    max_sequences=st.sampled_from((2, 5, 64)),
    itl_target_s=st.sampled_from((None, STEP_S, 3 * STEP_S)),
    spare_tokens=st.integers(0, 60),
)
def test_the_scheduler_keeps_its_promises(
    script: list[Arrival], policy: str, capacity: str, block_size: int, spare_tokens: int, **config: object
) -> None:
    clock, runner = (
        Clock(),
        ScriptedRunner(-(-(MAX_CONTEXT + spare_tokens) // block_size), block_size, max_context=MAX_CONTEXT),
    )
    config |= {"policy": policy, "capacity": capacity, "block_size": block_size, "prefix_cache": False}
    engine = Engine(runner, make_config(**config), None, clock)
    judge = engine._policy = Judge(engine._policy, name=policy, capacity=capacity)
    client = Client()
    with _low_bounds(), patch.object(estimate, "DEFAULT_TOKENS", HOPED_TOKENS):
        for step in range(MAX_STEPS):
            _let_them_come_and_go(script, step, engine, judge, clock)
            client.take(engine.step())
            engine.check()
            load = engine.load()
            assert load.free_blocks + load.cached_blocks + load.held_blocks == load.total_blocks
            assert 0 <= load.credit_blocks <= load.total_blocks
            clock.now = max(clock.now + STEP_S, judge.wake_at_s or 0.0)
            if step > 25 and load.running + load.waiting == 0:
                break
    assert (load.running, load.waiting, load.held_blocks) == (0, 0, 0)
    assert len(client.finishes) == len(script), "every request has got its end"
    told_ns = sum(round(seconds * 1e9) for _, seconds in load.waited_s_by_reason)
    assert told_ns == judge.queued_ns, "the reasons sum to the queue time"
    event(f"preempted: {min(judge.preempted, 3)}")
    event(f"backfilled: {min(judge.backfilled, 3)}")


def _let_them_come_and_go(script: list[Arrival], step: int, engine: Engine, judge: Judge, clock: Clock) -> None:
    for i, arrival in enumerate(script):
        key = SequenceKey(f"r{i}", 0)
        if arrival.at_step == step:
            request = make_request(
                key.request_id,
                arrival.prompt_tokens,
                arrival.max_tokens,
                ignore_eos=arrival.ignore_eos,
                band=arrival.band,
            )
            engine.add(bind(request, inbox_id=f"{step}-{i}"))
            judge.queued_since[key] = clock.now
        due_step = None if arrival.time_left_s is None else arrival.at_step + int(arrival.time_left_s / STEP_S)
        if due_step == step:
            engine.cancel(key.request_id, f"{step}-900")
            judge.leaves(key, clock.now)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_under_pressure_the_bounds_are_reached_and_kept(seed: int) -> None:
    """Every estimate is one token. Requests of a high band keep coming, grow and take the blocks of low-band prompts
    before those have sampled anything; large prompts stay blocked while small ones pass them.
    """
    dice, clock = random.Random(seed), Clock()
    engine = Engine(
        ScriptedRunner(24, 4, max_context=MAX_CONTEXT),
        make_config(chunk_tokens=16, max_sequences=16, prefix_cache=False),
        None,
        clock,
    )
    judge = engine._policy = Judge(engine._policy, name="chunked", capacity="over-commit")
    client, came = Client(), 0
    hopeful = patch.object(estimate.OutputEstimate, "remaining", lambda _self, _sequence: 1)
    with _low_bounds(), hopeful:
        for step in range(3_000):
            if step < 300 and dice.random() < 0.5:
                low = dice.random() < 0.3
                prompt, output = (dice.randrange(24, 44), 8) if low else (dice.randrange(1, 6), dice.randrange(5, 30))
                request = make_request(f"r{came}", prompt, output, ignore_eos=low, band=3 if low else 0)
                engine.add(bind(request, inbox_id=f"1-{came}"))
                judge.queued_since[SequenceKey(request.id, 0)] = clock.now
                came += 1
            client.take(engine.step())
            clock.now += STEP_S
            if len(client.finishes) == came and step > 300:
                break
    assert len(client.finishes) == came
    assert judge.most_preempted == MOST_PREEMPTIONS
    assert judge.most_overtaken == MOST_OVERTAKES
