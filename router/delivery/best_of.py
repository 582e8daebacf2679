"""Holds the choices of one request back until all have ended, and lets the likeliest through."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from headrace.events import Delta, Finished
from headrace.ranking import Candidate, likeliest
from router.delivery.merging import merged


class BestOf:
    """Every choice is journaled as it is computed, so what waits here can be read again by another router. Memory is
    bounded by choices × `max_tokens`. Not thread-safe: it lives on the event loop.
    """

    def __init__(self, choices: int, best: int, *, shows_logprobs: bool) -> None:
        self._best = best
        self._shows_logprobs = shows_logprobs
        self._outputs: list[list[Delta]] = [[] for _ in range(choices)]
        self._ends: dict[int, Finished] = {}

    def take(self, events: Iterable[Delta | Finished]) -> tuple[Delta | Finished, ...]:
        """() until the last choice has ended; then of each shown choice, the likeliest first, its output and its end,
        renumbered by rank.
        """
        for event in events:
            if isinstance(event, Finished):
                self._ends[event.choice] = event
            else:
                _join(self._outputs[event.choice], event)
        return self._shown() if len(self._ends) == len(self._outputs) else ()

    def _shown(self) -> tuple[Delta | Finished, ...]:
        shown: list[Delta | Finished] = []
        ended = [self._candidate(choice) for choice in range(len(self._outputs))]
        for rank, choice in enumerate(likeliest(ended, self._best)):
            for delta in self._outputs[choice]:
                shown.append(replace(delta, choice=rank, logprobs=delta.logprobs if self._shows_logprobs else ()))
            shown.append(replace(self._ends[choice], choice=rank))
        return tuple(shown)

    def _candidate(self, choice: int) -> Candidate:
        logprobs = [one for delta in self._outputs[choice] for one in delta.logprobs]
        return Candidate(self._ends[choice].reason, logprobs)


def _join(output: list[Delta], delta: Delta) -> None:
    joined = merged(output[-1], delta) if output else None
    if joined is None:
        output.append(delta)
    else:
        output[-1] = joined
