"""Batching policies: which tokens of which sequences the next forward pass computes.

Each is one class behind `Policy`, all run on the same engine and kernels. `chunked` and `continuous` decide anew in
every iteration and differ in how a prefill shares a pass with the decodes; `static` and `dynamic` (in `batching`) form
a batch and keep it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from workers.scheduler.batching import Dynamic, Static
from workers.scheduler.draft import Draft
from workers.scheduler.state import SchedulerState, StepPlan


class Policy(Protocol):
    def plan(self, state: SchedulerState, now: float) -> StepPlan:
        """The next step; `now` in seconds of the engine's clock. Reads `state`, never changes it; equal states at
        equal times give equal plans. The plan holds within the limits and gives work to at least one sequence
        whenever one is running, or waits and fits the pool; a policy that holds all of them back says in `wake_at_s`
        until when.
        """
        ...


Share = Callable[[int, Draft], int]
"""How many of a prefill's uncomputed tokens (the first argument) the draft's step computes; 0: none now."""


def _decodes_first(state: SchedulerState, now: float, share: Share) -> StepPlan:
    """Decodes, then the prefills that run, then those that wait, each with its share of what the decodes have time
    for."""
    draft = Draft(state)
    draft.advance_decodes()
    draft.keep_pace(now)
    draft.advance_prefills(share)
    draft.admit_waiting(share)
    return draft.finished()


class Chunked:
    """Decodes first, then as much of the prefills as the step's tokens allow (Sarathi-Serve): a long prompt never
    holds up a decode for more than one chunk.
    """

    def plan(self, state: SchedulerState, now: float) -> StepPlan:
        return _decodes_first(state, now, self._share)

    @staticmethod
    def _share(gap: int, draft: Draft) -> int:
        return min(gap, draft.tokens_left)


class Continuous:
    """Iteration-level batching with whole prefills (Orca): prompts are never cut. The first prefill of a step runs
    whatever its length, even past the token budget; further ones join while they fit.
    """

    def plan(self, state: SchedulerState, now: float) -> StepPlan:
        return _decodes_first(state, now, self._share)

    @staticmethod
    def _share(gap: int, draft: Draft) -> int:
        fits = gap <= draft.tokens_left
        return gap if fits or (draft.prefills == 0 and gap > 1) else 0


_REGISTRY: dict[str, Callable[[], Policy]] = {
    "chunked": Chunked,
    "continuous": Continuous,
    "dynamic": Dynamic,
    "static": Static,
}


def policy_names() -> tuple[str, ...]:
    return tuple(_REGISTRY)


def make_policy(name: str) -> Policy:
    """Raises ValueError naming the known policies."""
    if name not in _REGISTRY:
        raise ValueError(f"unknown scheduling policy {name!r}; known: {', '.join(_REGISTRY)}")
    return _REGISTRY[name]()
