"""Finds stop strings in a text that arrives in pieces, and holds back no more than it must."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """The first stop string to *complete* wins: the earliest end, and of those that end together the earliest start.

    Text is held back only while it is a prefix of some stop string; a near miss is released as soon as it is one. The
    answer does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        """`include` keeps the stop string itself in the text."""
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self._matched = False

    def push(self, text: str, *, armed: bool = True) -> tuple[str, bool]:
        """(text that may be shown now, whether a stop string has completed).

        Unarmed, a stop string that completes in this piece is plain text (`min_tokens` is not reached); one that
        merely begins in it may still complete later. After a match nothing more is released.
        """
        if self._matched:
            return "", True
        if not self._stops:
            return text, False
        pending = self._held + text
        if armed and (span := self._first_to_complete(pending, len(self._held))) is not None:
            start, end = span
            self._held, self._matched = "", True
            return pending[: end if self._include else start], True
        keep = self._open_suffix(pending)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep], False

    def flush(self) -> str:
        """Releases what is held: the text ends here, so nothing can complete any more."""
        held, self._held = self._held, ""
        return held

    def _first_to_complete(self, pending: str, old: int) -> tuple[int, int] | None:
        """The match must end beyond the `old` characters, which were looked at before."""
        spans = []
        for stop in self._stops:
            start = pending.find(stop, max(0, old - len(stop) + 1))
            if start >= 0:
                spans.append((start + len(stop), start))
        if not spans:
            return None
        end, start = min(spans)
        return start, end

    def _open_suffix(self, pending: str) -> int:
        """Length of the longest suffix that is a proper prefix of a stop string."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(pending)), longest, -1):
                if pending.endswith(stop[:size]):
                    longest = size
                    break
        return longest
