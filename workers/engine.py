"""The engine: continuous batching over one model runner, one iteration at a time (DESIGN section 6).

    inbox → plan → forward → accept → publish
      ↑                                  │
      └──────────────────────────────────┘

One daemon thread runs `step`. Other threads talk to it through the mailbox only: what they ask for takes effect at
the next iteration boundary, what it says leaves as frames, in order. It never waits for the store, and never spins:
without work it sleeps on a condition, and while frames of ten seconds wait to be taken it pauses.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

from headrace.frame import FinishReason, Frame, LoadReport, Part
from headrace.request import BoundRequest
from workers.config import EngineConfig
from workers.generation import Generation, bounds_of, objection_to
from workers.holdings import Reuse
from workers.kv.ledger import Reason
from workers.load import NOTHING_SEEN, load_report
from workers.lobby import OVERDUE, Lobby
from workers.mailbox import Add, Cancel, Compiled, Drain, Forget, Reset, Seen
from workers.model.interface import Computed, ModelRunner, Sampled, SequenceSlice
from workers.port import EnginePort
from workers.roster import Roster
from workers.sampling.grammar import GrammarPosition
from workers.scheduler.capacity import make_capacity
from workers.scheduler.policy import make_policy
from workers.scheduler.state import Limits, StepPlan
from workers.scheduler.step_log import StepLog
from workers.scheduler.step_time import StepTime
from workers.step_statistics import StepStatistics

if TYPE_CHECKING:
    from headrace.tokenizer import Tokenizer
    from workers.sampling.grammar_thread import Start

logger = logging.getLogger(__name__)

MAX_DEVICE_FAULTS = 3
"""Forward passes that may fail in a row before the engine gives up and lets its health fail."""

_REASON_OF = {FinishReason.CANCELLED: Reason.CANCEL, FinishReason.FAILED: Reason.FAIL}


class Engine(EnginePort):
    """`add`, `cancel`, `seen`, `forget`, `reset`, `drain`, `next_frame`, `beat`, `load` and the ages may be called
    from any thread; `step` by one at a time (the engine's own after `start`, a test's without it).
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        clock: Callable[[], float] = time.monotonic,
        step_time: StepTime | None = None,
    ) -> None:
        """`step_time`: what the warm-up has measured; None: it is learned from the first passes."""
        self._runner = runner
        self._tokenizer = tokenizer
        super().__init__(clock)
        self._limits = Limits(config.chunk_tokens, config.max_sequences, runner.num_blocks, config.block_size)
        self._step_log = StepLog(config.policy, config.capacity, self._limits) if config.step_log else None
        self._policy = self._step_log or make_policy(config.policy)
        self._step_log_folder = config.step_log
        self._bounds = bounds_of(runner.shape, config.max_context)
        reuse = Reuse(config.prefix_cache, runner.shape.weight_version, runner.host_blocks, runner.move_block_s)
        self._roster = Roster(self._limits, reuse)
        self._roster.state.capacity = make_capacity(config.capacity)
        self._roster.state.itl_s = config.itl_target_s
        self._roster.state.step_time = step_time or StepTime()
        self._lobby = Lobby(tokenizer, self._mailbox.post, clock)
        self._statistics = StepStatistics()
        self._ranks = itertools.count()
        self._frame_numbers = itertools.count(1)
        self._parts: list[Part] = []
        self._last_inbox_id = NOTHING_SEEN
        self._draining = False
        self._device_faults = 0
        self._step_began_s: float | None = None
        self._step_expected_s = 0.0
        self._oldest_advanced_s: float | None = None
        self._unstarted: tuple[tuple[str, int], ...] = ()
        self._wake_at_s: float | None = None
        """Until when a policy that holds all work back wants to sleep."""
        self._thread: threading.Thread | None = None
        self._latest = self._make_frame(StepPlan(()))

    # ---- the iteration ---------------------------------------------------------------------------------------------

    def step(self) -> Frame | None:
        """One iteration. Returns the frame it published; None when there was nothing to read and nothing to compute."""
        began_s = self._clock()
        news, resets = self._read_inbox()
        plan = self._plan()
        self._wake_at_s = None if plan.work else plan.wake_at_s
        if plan.work:
            self._statistics.batch.record(plan, len(self._roster.state.running))
            self._accept(plan, self._forward(plan))
            self._measure(plan, self._clock() - began_s)
        if not (news or plan.work or self._parts):
            return None
        return self._publish(plan, resets)

    def _read_inbox(self) -> tuple[bool, int]:
        commands, resets = self._mailbox.take()
        for command in commands:
            match command:
                case Add(bound, came_s):
                    if not (self._holds(bound) or self._lobby.keeps(bound, came_s)):
                        self._take_on(bound, came_s)
                    self._last_inbox_id = bound.inbox_id
                case Compiled(bound, start):
                    if self._lobby.leave(bound.request.id, bound.epoch):
                        self._take_on(bound, self._clock(), start)
                case Cancel(request_id, inbox_id):
                    self._end_request(request_id, FinishReason.CANCELLED)
                    self._last_inbox_id = inbox_id
                case Seen(inbox_id):
                    self._last_inbox_id = inbox_id
                case Forget(request_id, epoch):
                    self._drop(request_id, epoch)
                case Drain():
                    self._draining = True
                case Reset():
                    self._drop_everything()
                case _:
                    assert_never(command)
        for bound in self._lobby.overdue():
            self._refuse(bound, OVERDUE)
        return bool(commands), resets

    def _plan(self) -> StepPlan:
        """Plans, ends what the pool can never hold, and books the plan's blocks. Each round of the loop ends a
        request.
        """
        while True:
            now = self._clock()
            plan = self._policy.plan(self._roster.state, now)
            if not plan.unfit:
                break
            for unfit in plan.unfit:
                self._end_request(unfit.key.request_id, FinishReason.FAILED, unfit.detail)
        self._roster.apply(plan, self._statistics.iterations + 1, now)
        self._statistics.preemptions_total += len(plan.preempted)
        return plan

    def _forward(self, plan: StepPlan) -> tuple[Computed, ...]:
        """Runs the model; one result per piece of work. When the device fails, the requests of this step end, and
        there are none.
        """
        slices = tuple(self._roster.slice_for(work) for work in plan.work)
        self._step_expected_s = self._roster.state.step_time.predict_s(plan.features)
        self._step_began_s = self._clock()
        try:
            results = self._runner.forward((*slices, *self._padding(plan)), self._roster.holdings.moves)
        except Exception as error:
            self._device_faults += 1
            logger.exception("forward pass failed (%d in a row)", self._device_faults)
            for request_id in {work.key.request_id: None for work in plan.work}:
                self._end_request(
                    request_id, FinishReason.FAILED, f"the device failed: {type(error).__name__}: {error}"
                )
            self._roster.holdings.moves_lost()
            return (Computed(),) * len(slices)
        finally:
            self._step_began_s = None
        self._device_faults = 0
        return results[: len(slices)]

    def _measure(self, plan: StepPlan, step_s: float) -> None:
        self._statistics.record(step_s, sum(len(part.token_ids) for part in self._parts))
        if self._device_faults == 0:
            self._roster.state.step_time.measured(plan.features, step_s)

    def _padding(self, plan: StepPlan) -> tuple[SequenceSlice, ...]:
        scratch, size = self._runner.scratch_block, self._limits.block_size
        return tuple(SequenceSlice((0,) * rows, 0, (scratch,) * -(-rows // size), None) for rows in plan.padding)

    def _accept(self, plan: StepPlan, results: tuple[Computed, ...]) -> None:
        """Commits what was computed and takes the sampled tokens; whatever ends gives its blocks back at once."""
        now = self._clock()
        for work, computed in zip(plan.work, results, strict=True):
            generation = self._roster.get(work.key)
            if generation is None:  # its request failed in this very step
                continue
            generation.take_scores(work.start, computed.scores)
            self._statistics.prompt_tokens_total += generation.computed_to(work.start + work.count, now)
            sampled = computed.sampled
            if sampled is None:
                continue
            if fault := self._take_token(generation, sampled):
                self._end_request(work.key.request_id, FinishReason.FAILED, fault)
                continue
            self._roster.holdings.register(generation)
            if generation.finish is None:
                self._roster.sampled(generation.sequence, now)
                self._parts.append(generation.part())
            else:
                self._end(generation, generation.finish)

    def _take_token(self, generation: Generation, sampled: Sampled) -> str:
        """Returns "" or, in a sentence, why this one request cannot go on."""
        if sampled.fault:
            return generation.grammar_fault or sampled.fault
        if not 0 <= sampled.token_id < self._bounds.vocab_size:
            return f"the sampler gave token {sampled.token_id}, outside the vocabulary of {self._bounds.vocab_size}"
        try:
            generation.accept(sampled.token_id, sampled.logprob)
        except Exception as error:  # text of odd tokens is the one part of it that others' files decide
            logger.exception("request %s cannot take its next token", generation.bound.request.id)
            return f"token {sampled.token_id} cannot be taken: {type(error).__name__}: {error}"
        return ""

    def _publish(self, plan: StepPlan, resets: int) -> Frame:
        frame = self._make_frame(plan)
        self._parts.clear()
        self._note_progress()
        self._latest = frame
        self._unstarted = self._roster.unstarted(self._statistics.iterations, plan.held)
        self._mailbox.publish(frame, resets)
        return frame

    def _make_frame(self, plan: StepPlan) -> Frame:
        load = load_report(
            self._roster, self._statistics, self._runner.shape, self._bounds.max_context, plan, self._draining
        )
        load = replace(self._lobby.counted_in(load), seq=next(self._frame_numbers))
        return Frame(load, tuple(self._parts), self._last_inbox_id)

    # ---- requests come and go --------------------------------------------------------------------------------------

    def _holds(self, bound: BoundRequest) -> bool:
        """The inbox delivers at least once: the same binding again, or an older one, changes nothing."""
        held = self._roster.of_request(bound.request.id)
        return bool(held) and held[0].bound.epoch >= bound.epoch

    def _take_on(self, bound: BoundRequest, came_s: float, start: Start | None = None) -> None:
        """Starts every choice of a request, in place of those of an older binding. `start`: of its grammar."""
        self._drop(bound.request.id, None)
        if objection := objection_to(bound, self._bounds, self._tokenizer):
            self._refuse(bound, objection)
            return
        try:
            generations = [self._begin(bound, choice, came_s, start) for choice in range(bound.request.n)]
        except Exception as error:
            logger.exception("request %s cannot be started", bound.request.id)
            self._refuse(bound, f"it cannot be started: {type(error).__name__}: {error}")
            return
        for generation in generations:
            if generation.finish is None:
                self._roster.add(generation, self._statistics.iterations)
            else:  # an earlier holder had journaled its last token but not its end
                self._parts.append(generation.part())

    def _begin(self, bound: BoundRequest, choice: int, came_s: float, start: Start | None) -> Generation:
        position = None if start is None else GrammarPosition(start)
        return Generation(bound, choice, next(self._ranks), self._bounds, self._tokenizer, came_s, position)

    def _refuse(self, bound: BoundRequest, detail: str, finish: FinishReason = FinishReason.FAILED) -> None:
        for choice in range(bound.request.n):
            journaled = len(bound.journal[choice]) if choice < len(bound.journal) else 0
            self._parts.append(Part(bound.request.id, choice, bound.epoch, journaled, (), finish, detail))

    def _end_request(self, request_id: str, finish: FinishReason, detail: str = "") -> None:
        if bound := self._lobby.leave(request_id):
            self._refuse(bound, detail, finish)
        for generation in self._roster.of_request(request_id):
            self._end(generation, finish, detail)

    def _end(self, generation: Generation, finish: FinishReason, detail: str = "") -> None:
        self._parts.append(generation.part(finish, detail))
        self._roster.remove(generation, _REASON_OF.get(finish, Reason.FINISH), self._clock())
        if finish in (FinishReason.STOP, FinishReason.LENGTH):
            self._roster.state.capacity.finished(generation.output_tokens)

    def _drop(self, request_id: str, epoch: int | None) -> None:
        self._lobby.leave(request_id, epoch)
        for generation in self._roster.of_request(request_id):
            if epoch is None or generation.bound.epoch == epoch:
                self._roster.remove(generation, Reason.CANCEL, self._clock())

    def _drop_everything(self) -> None:
        for request_id in self._roster.request_ids():
            self._drop(request_id, None)
        self._lobby.clear()
        self._parts.clear()
        self._last_inbox_id = NOTHING_SEEN
        self._draining = False

    def _note_progress(self) -> None:
        running = self._roster.state.running
        self._oldest_advanced_s = min((sequence.advanced_s for sequence in running), default=None)

    # ---- the port of the other threads -----------------------------------------------------------------------------

    def load(self) -> LoadReport:
        """The load after the last iteration."""
        return self._latest.load

    def beat(self) -> Frame:
        """The last iteration's load under a new number, without parts, with the inbox id that it counts."""
        latest = self._latest
        return replace(latest, load=replace(latest.load, seq=next(self._frame_numbers)), parts=())

    def unstarted(self) -> tuple[tuple[str, int], ...]:
        """(request id, epoch) of bound work that could not be started within two iterations; it may be handed back."""
        return self._unstarted

    def step_age_s(self) -> float:
        """How long the forward pass now running has run; 0.0 between passes."""
        began_s = self._step_began_s
        return 0.0 if began_s is None else max(0.0, self._clock() - began_s)

    def step_expected_s(self) -> float:
        """How long the pass that runs, or ran last, was predicted to take; 0.0 while nothing has been measured. Whole
        prefills and padded batches take many times what the warm-up saw.
        """
        return self._step_expected_s

    def oldest_runnable_age_s(self) -> float:
        """Seconds since the slowest running sequence last advanced; 0.0 when none runs or the engine is paused by a
        full outbox.
        """
        advanced_s = self._oldest_advanced_s
        return 0.0 if advanced_s is None else max(0.0, self._clock() - advanced_s)

    def check(self) -> None:
        """Between steps: raises LedgerDrift unless blocks, tables and sequences agree. O(blocks)."""
        self._roster.check()

    @property
    def alive(self) -> bool:
        """False before `start`, and once the loop has ended: stopped, a bug of ours, or MAX_DEVICE_FAULTS in a row."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Runs the loop in its own daemon thread."""
        self._lobby.open()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Ends the loop after the iteration that is running; what is held is left as it is. False if that took too
        long.
        """
        self._mailbox.stop()
        if self._thread is not None:
            self._thread.join(timeout_s)
        return not self.alive

    def _run(self) -> None:
        try:
            while self._device_faults < MAX_DEVICE_FAULTS and self._await_work():
                self.step()
        except Exception:
            logger.exception("the engine's loop ended")
        finally:
            self._write_step_log()

    def _write_step_log(self) -> None:
        if self._step_log is None or self._step_log_folder is None:
            return
        path = Path(self._step_log_folder) / f"steps-{os.getpid()}.jsonl"
        try:
            path.write_text("".join(f"{line}\n" for line in self._step_log.lines()), encoding="utf-8")
        except OSError as error:
            logger.warning("the step log cannot be written: %s", error)

    def _await_work(self) -> bool:
        """Sleeps while there is nothing to do or nobody takes the frames; False once stopping."""
        if self._mailbox.is_full:
            self._oldest_advanced_s = None  # a pause is the store's fault, not ours: it does not count against health
            if not self._mailbox.wait_for_room():
                return False
            self._roster.resume(self._clock())
            self._note_progress()
        if len(self._roster) == 0:
            return self._mailbox.wait_for_command(self._lobby.patience_s())
        if self._wake_at_s is not None:
            return self._mailbox.wait_for_command(max(0.0, self._wake_at_s - self._clock()))
        return not self._mailbox.is_stopping
