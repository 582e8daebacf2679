"""Who may hold KV memory: a question of its own, apart from who runs in the next step.

Both answers are tests on how sequences will grow. `OverCommit` trusts estimates and lets memory that one sequence will
have given back serve another; when the estimates were too low, somebody is preempted. `NoEvict` gives a sequence its
whole length at once (as TensorRT-LLM's GUARANTEED_NO_EVICT does), so nobody ever loses memory and fewer run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from workers.scheduler.estimate import OutputEstimate
from workers.scheduler.peak import Growth, earliest_reserved_start, earliest_start, peak_blocks, reserved_blocks
from workers.scheduler.sequence import Sequence


class Capacity(Protocol):
    """Growths are sorted longest-lived first wherever several are given."""

    def to_come(self, sequence: Sequence) -> int:
        """Output tokens to count on, from 1 to what `max_tokens` leaves."""
        ...

    def need_blocks(self, growths: Iterable[Growth], block_size: int) -> int:
        """Blocks that have to be there so that all of these may run."""
        ...

    def earliest_start(self, running: list[Growth], newcomer: Growth, block_size: int, total_blocks: int) -> int:
        """In how many tokens per sequence the newcomer may run beside what is left of `running` by then."""
        ...

    def finished(self, output_tokens: int) -> None:
        """One request ended by itself after so many tokens."""
        ...

    def preempted(self) -> None:
        """Blocks ran out."""
        ...

    def memory(self) -> dict[str, Any]:
        """All that its answers depend on besides the questions, as plain JSON."""
        ...

    def recall(self, memory: dict[str, Any]) -> None:
        """Answers from here on as the one did whose memory this is."""
        ...


class OverCommit:
    """The exact peak test with an online estimate of output lengths."""

    def __init__(self) -> None:
        self.estimate = OutputEstimate()

    def to_come(self, sequence: Sequence) -> int:
        """One that was preempted too often counts in full: its next stay is its last."""
        return sequence.most_to_come if sequence.is_protected else self.estimate.remaining(sequence)

    def need_blocks(self, growths: Iterable[Growth], block_size: int) -> int:
        return peak_blocks(growths, block_size)

    def earliest_start(self, running: list[Growth], newcomer: Growth, block_size: int, total_blocks: int) -> int:
        return earliest_start(running, newcomer, block_size, total_blocks)

    def finished(self, output_tokens: int) -> None:
        self.estimate.finished(output_tokens)

    def preempted(self) -> None:
        self.estimate.preempted()

    def memory(self) -> dict[str, Any]:
        return self.estimate.memory()

    def recall(self, memory: dict[str, Any]) -> None:
        self.estimate.recall(memory)


class NoEvict:
    """Prompt and `max_tokens` are reserved to the end."""

    def to_come(self, sequence: Sequence) -> int:
        return sequence.most_to_come

    def need_blocks(self, growths: Iterable[Growth], block_size: int) -> int:
        return reserved_blocks(growths, block_size)

    def earliest_start(self, running: list[Growth], newcomer: Growth, block_size: int, total_blocks: int) -> int:
        return earliest_reserved_start(running, newcomer, block_size, total_blocks)

    def finished(self, output_tokens: int) -> None:
        """What others needed does not matter."""

    def preempted(self) -> None:
        """Only a sequence longer than the pool can lose its blocks, and that says nothing of the others."""

    def memory(self) -> dict[str, Any]:
        return {}

    def recall(self, memory: dict[str, Any]) -> None:
        """There is nothing to recall."""


_REGISTRY: dict[str, Callable[[], Capacity]] = {"over-commit": OverCommit, "no-evict": NoEvict}


def capacity_names() -> tuple[str, ...]:
    return tuple(_REGISTRY)


def make_capacity(name: str) -> Capacity:
    """Raises ValueError naming the known ones."""
    if name not in _REGISTRY:
        raise ValueError(f"unknown capacity {name!r}; known: {', '.join(_REGISTRY)}")
    return _REGISTRY[name]()
