"""The last plans of a worker with all that they depended on, so that each can be made again and looked into.

A plan is a pure function of (state, clock). The log stands between engine and policy, notes both, and what the policy
asked of the block accounts; `replay` gives the same to a fresh policy and must get the same plan. JSON lines: the
first names policy, capacity and limits, every other is one plan and stands for itself, so the log can be a ring.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields, replace
from operator import attrgetter
from typing import Any

from workers.scheduler.capacity import make_capacity
from workers.scheduler.policy import make_policy
from workers.scheduler.room import Books, Hit
from workers.scheduler.sequence import Sequence, SequenceKey
from workers.scheduler.state import Batch, Limits, SchedulerState, StepPlan
from workers.scheduler.step_time import Features, StepTime

MOST_PLANS = 1_024
"""Some 25 kB each where 256 sequences run."""

_SEQUENCE_FIELDS = tuple(field.name for field in fields(Sequence))
_values_of = attrgetter(*_SEQUENCE_FIELDS)


class StepLog:
    """A policy that notes what the policy of this name is asked and answers."""

    def __init__(self, policy: str, capacity: str, limits: Limits, most_plans: int = MOST_PLANS) -> None:
        self._policy = make_policy(policy)
        self._header = json.dumps({"policy": policy, "capacity": capacity, "limits": asdict(limits)})
        self._plans: deque[str] = deque(maxlen=most_plans)

    def plan(self, state: SchedulerState, now: float) -> StepPlan:
        noting = _NotingBooks(state.books)
        plan = self._policy.plan(replace(state, books=noting), now)
        noted = {"now": now, **_encoded_state(state), **noting.noted(), "plan": encoded_plan(plan)}
        self._plans.append(json.dumps(noted, separators=(",", ":")))
        return plan

    def lines(self) -> Iterator[str]:
        """The header, then the kept plans, oldest first."""
        yield self._header
        yield from self._plans


def replay(lines: Iterable[str]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """For each plan of a log: as it was recorded, and as it is made now from what was recorded with it."""
    rest = iter(lines)
    header = json.loads(next(rest))
    policy, limits = make_policy(header["policy"]), Limits(**header["limits"])
    for line in rest:
        noted = json.loads(line)
        state = _decoded_state(noted, header["capacity"], limits)
        yield noted["plan"], json.loads(json.dumps(encoded_plan(policy.plan(state, noted["now"]))))


class _NotingBooks:
    """Passes questions on and notes the answers."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._hits: dict[SequenceKey, Hit] = {}
        self._shared: dict[SequenceKey, tuple[int, ...]] = {}
        self._references: dict[int, int] = {}

    def hit_of(self, sequence: Sequence) -> Hit:
        return self._hits.setdefault(sequence.key, self._books.hit_of(sequence))

    def shared_ids(self, key: SequenceKey) -> tuple[int, ...]:
        return self._shared.setdefault(key, self._books.shared_ids(key))

    def references(self, block_id: int) -> int:
        return self._references.setdefault(block_id, self._books.references(block_id))

    def noted(self) -> dict[str, Any]:
        hits = [
            (key, {**asdict(hit), "frontier": hit.frontier and hit.frontier.hex()}) for key, hit in self._hits.items()
        ]
        return {"hits": hits, "shared": list(self._shared.items()), "references": list(self._references.items())}


class _NotedBooks:
    """Gives the answers that were noted; KeyError for a question that was not asked then."""

    def __init__(self, noted: dict[str, Any]) -> None:
        self._hits = {SequenceKey(*key): _decoded_hit(hit) for key, hit in noted["hits"]}
        self._shared = {SequenceKey(*key): tuple(ids) for key, ids in noted["shared"]}
        self._references: dict[int, int] = dict(noted["references"])

    def hit_of(self, sequence: Sequence) -> Hit:
        return self._hits[sequence.key]

    def shared_ids(self, key: SequenceKey) -> tuple[int, ...]:
        return self._shared[key]

    def references(self, block_id: int) -> int:
        return self._references[block_id]


def _decoded_hit(noted: dict[str, Any]) -> Hit:
    frontier = noted["frontier"] and bytes.fromhex(noted["frontier"])
    lists = {name: tuple(noted[name]) for name in ("block_ids", "host_slots")}
    return Hit(**{**noted, **lists, "frontier": frontier})


def _encoded_state(state: SchedulerState) -> dict[str, Any]:
    step_time = state.step_time
    return {
        "running": [_values_of(sequence) for sequence in state.running],
        "waiting": [_values_of(sequence) for sequence in state.waiting],
        "free_blocks": state.free_blocks,
        "batch": (state.batch.slots, sorted(state.batch.members)),
        "capacity": state.capacity.memory(),
        "step_time": (step_time.coefficients, step_time.margin) if step_time.is_fitted else None,
    }


def _decoded_state(noted: dict[str, Any], capacity: str, limits: Limits) -> SchedulerState:
    slots, members = noted["batch"]
    state = SchedulerState(
        limits=limits,
        capacity=make_capacity(capacity),
        running=[_decoded_sequence(values) for values in noted["running"]],
        waiting=[_decoded_sequence(values) for values in noted["waiting"]],
        free_blocks=noted["free_blocks"],
        books=_NotedBooks(noted),
        batch=Batch(slots, {SequenceKey(*key) for key in members}),
    )
    state.capacity.recall(noted["capacity"])
    if noted["step_time"] is not None:
        coefficients, margin = noted["step_time"]
        state.step_time = StepTime.of(Features(*coefficients), margin)
    return state


def _decoded_sequence(values: list[Any]) -> Sequence:
    named = dict(zip(_SEQUENCE_FIELDS, values, strict=True))
    return Sequence(**{**named, "key": SequenceKey(*named["key"])})


def encoded_plan(plan: StepPlan) -> dict[str, Any]:
    """A plan as plain JSON, every field of it."""
    return {**{field.name: getattr(plan, field.name) for field in fields(plan)}, **_as_lists(plan)}


def _as_lists(plan: StepPlan) -> dict[str, Any]:
    return {
        "work": [(work.key, work.start, work.count) for work in plan.work],
        "unfit": [(unfit.key, unfit.detail) for unfit in plan.unfit],
        "held": sorted(plan.held),
    }
