"""One workload through one engine, by one policy: when each token came, and whom each pass advanced."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from benchmarks.errors import BenchError
from benchmarks.lab.workloads import Ask, LabWorkload
from benchmarks.prompts import PromptMaker
from benchmarks.record import CallRecord
from headrace.frame import FinishReason, Frame, LoadReport
from headrace.request import BoundRequest, Request
from headrace.sampling import SamplingParams
from workers.config import EngineConfig
from workers.engine import Engine
from workers.model.interface import ModelRunner

IDLE_S = 0.001
"""How long the driver sleeps when the engine had nothing to compute."""


class Clock(Protocol):
    def __call__(self) -> float: ...
    def sleep(self, seconds: float) -> None: ...


@dataclass(frozen=True)
class Replay:
    """Times in seconds from the start; `load` is the report after the last iteration, its totals those of the run."""

    workload: LabWorkload
    policy: str
    records: tuple[CallRecord, ...]
    advanced: tuple[int, ...]
    """How many sequences each forward pass computed something of."""
    load: LoadReport
    cpu_s: float
    """CPU time of this process, all threads together: other work on the machine moves it less than the clock's."""

    @property
    def duration_s(self) -> float:
        return max(record.end_s for record in self.records)


class _Answers:
    """What has come of each request so far."""

    def __init__(self, workload: LabWorkload) -> None:
        self._asks = workload.asks
        self._token_s: list[list[float]] = [[] for _ in workload.asks]
        self._sent_s = [0.0] * len(workload.asks)
        self._end_s: dict[int, float] = {}
        self._before: LoadReport | None = None
        self.advanced: list[int] = []

    def sent(self, index: int, now_s: float) -> None:
        self._sent_s[index] = now_s

    def take(self, frame: Frame, now_s: float) -> None:
        """Raises BenchError for an answer that ends otherwise than at its length."""
        self._note_pass(frame.load)
        for part in frame.parts:
            index = int(part.request_id)
            self._token_s[index].extend([now_s] * len(part.token_ids))
            if part.finish is not None:
                self._end_s[index] = now_s
                if part.finish is not FinishReason.LENGTH:
                    raise BenchError(f"request {index} ended with {part.finish.value}: {part.detail}")

    def _note_pass(self, load: LoadReport) -> None:
        before = self._before
        if load.iterations > (before.iterations if before else 0):
            self.advanced.append(_useful_slot_steps(load) - (_useful_slot_steps(before) if before else 0))
        self._before = load

    @property
    def missing(self) -> int:
        return len(self._asks) - len(self._end_s)

    def records(self) -> tuple[CallRecord, ...]:
        return tuple(self._record(index, ask) for index, ask in enumerate(self._asks))

    def _record(self, index: int, ask: Ask) -> CallRecord:
        times = tuple(self._token_s[index])
        return CallRecord(
            index=index,
            scheduled_s=ask.at_s,
            sent_s=self._sent_s[index],
            token_s=times,
            deltas=len(times),
            end_s=self._end_s[index],
            input_tokens=ask.prompt_tokens,
            expected_tokens=ask.output_tokens,
        )


def replay(
    workload: LabWorkload, policy: str, runner: ModelRunner, clock: Clock, *, block_size: int = 16, seed: int = 0
) -> Replay:
    """A fresh engine, with an empty cache, on a runner that may have served before. The engine is stepped from here:
    no thread takes turns with it. Raises BenchError when an answer fails.
    """
    config = EngineConfig(
        model_path="",
        model_name=runner.shape.name,
        block_size=block_size,
        chunk_tokens=workload.chunk_tokens,
        max_sequences=workload.max_sequences,
        policy=policy,
    )
    engine = Engine(runner, config, None, clock)
    answers = _Answers(workload)
    requests = _requests(workload, runner.shape.name, runner.shape.vocab_size, seed)
    cpu_began_s = time.process_time()
    _drive(engine, deque(zip(workload.asks, requests, strict=True)), answers, clock)
    cpu_s = time.process_time() - cpu_began_s
    return Replay(workload, policy, answers.records(), tuple(answers.advanced), engine.load(), cpu_s)


def _drive(engine: Engine, coming: deque[tuple[Ask, Request]], answers: _Answers, clock: Clock) -> None:
    began_s = clock()

    def now_s() -> float:
        return clock() - began_s

    while answers.missing:
        while coming and coming[0][0].at_s <= now_s():
            _, request = coming.popleft()
            answers.sent(int(request.id), now_s())
            engine.add(BoundRequest(request, 1, "lab", f"{int(request.id) + 1}-0", ()))
        frame = engine.step()
        if frame is None:
            clock.sleep(IDLE_S)
        else:
            answers.take(frame, now_s())


def _useful_slot_steps(load: LoadReport) -> int:
    return load.slot_steps_total - load.slot_steps_wasted_total


def _requests(workload: LabWorkload, model: str, vocab_size: int, seed: int) -> list[Request]:
    maker = PromptMaker(seed, vocab_size)
    return [
        Request(
            id=str(index),
            model=model,
            prompt_token_ids=tuple(maker.prompt(index, ask.prompt_tokens)),
            sampling=SamplingParams(max_tokens=ask.output_tokens, temperature=0.0, seed=0, ignore_eos=True),
        )
        for index, ask in enumerate(workload.asks)
    ]
