"""Holds the choices of one request back until all have ended, and lets the likeliest through."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from headrace.events import Delta, Finished
from headrace.ranking import Candidate, likeliest


class BestOf:
    """Every choice is journaled as it is computed, so what waits here can be read again by another router. Memory is
    bounded by choices × `max_tokens`. Not thread-safe: it lives on the event loop.
    """

    def __init__(self, choices: int, best: int, *, shows_logprobs: bool) -> None:
        self._best = best
        self._shows_logprobs = shows_logprobs
        self._outputs = [Delta(choice, 0, (), "") for choice in range(choices)]
        self._ends: dict[int, Finished] = {}

    def take(self, events: Iterable[Delta | Finished]) -> tuple[Delta | Finished, ...]:
        """() until the last choice has ended; then of each shown choice, the likeliest first, one delta and its end,
        renumbered by rank.
        """
        for event in events:
            if isinstance(event, Finished):
                self._ends[event.choice] = event
            else:
                self._outputs[event.choice] = _joined(self._outputs[event.choice], event)
        return self._shown() if len(self._ends) == len(self._outputs) else ()

    def _shown(self) -> tuple[Delta | Finished, ...]:
        ended = [Candidate(self._ends[output.choice].reason, output.logprobs) for output in self._outputs]
        shown: list[Delta | Finished] = []
        for rank, choice in enumerate(likeliest(ended, self._best)):
            output = self._outputs[choice]
            if output.token_ids:
                logprobs = output.logprobs if self._shows_logprobs else ()
                shown.append(replace(output, choice=rank, logprobs=logprobs))
            shown.append(replace(self._ends[choice], choice=rank))
        return tuple(shown)


def _joined(before: Delta, after: Delta) -> Delta:
    return replace(
        before,
        token_ids=before.token_ids + after.token_ids,
        text=before.text + after.text,
        logprobs=before.logprobs + after.logprobs,
    )
