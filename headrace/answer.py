"""What a stream of messages adds up to at a client: one output for each choice."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

from headrace.errors import Unavailable
from headrace.events import Accepted, Delta, Finished, PromptLogprobs
from headrace.logprobs import TokenLogprob
from headrace.v1 import inference_pb2 as pb
from headrace.wire import error_from_finish, event_from_proto


@dataclass(frozen=True)
class Output:
    """One choice as far as it has come."""

    choice: int
    text: str
    token_ids: tuple[int, ...]
    """From index 0 without a hole: their number is the index of the token that comes next."""
    finished: Finished | None
    """How it ended and what it used; None while it runs."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each token where they were asked for."""


class StreamFold:
    """The state of one stream, fed by its messages in order; knows nothing of how they arrive."""

    def __init__(self, choices: int = 1) -> None:
        """`choices` is how many were asked for: so many have to end."""
        self.accepted: Accepted | None = None
        self.prompt_logprobs: PromptLogprobs | None = None
        self.pending: deque[Delta] = deque()
        """Deltas that arrived and were not yet handed to the caller."""
        self._asked = max(1, choices)
        self._choices: defaultdict[int, _Choice] = defaultdict(_Choice)

    @property
    def finished(self) -> Finished | None:
        """How choice 0 ended."""
        return self._choices[0].finished

    @property
    def complete(self) -> bool:
        """Every choice has ended."""
        return sum(choice.finished is not None for choice in self._choices.values()) == self._asked

    @property
    def outputs(self) -> tuple[Output, ...]:
        """Of each choice, by its index, what has come so far."""
        return tuple(self._choices[index].output(index) for index in range(self._asked))

    def take(self, message: pb.GenerateEvent) -> None:
        """Raises the error that an ending other than `stop` and `length` means."""
        event = event_from_proto(message)
        if isinstance(event, Delta):
            choice = self._choice(event.choice)
            choice.pieces.append(event.text)
            choice.token_ids.extend(event.token_ids)
            choice.logprobs.extend(event.logprobs)
            self.pending.append(event)
        elif isinstance(event, Accepted):
            self.accepted = event
        elif isinstance(event, PromptLogprobs):
            self.prompt_logprobs = event
        elif isinstance(event, Finished):
            self._choice(event.choice).finished = event
            if (error := error_from_finish(event)) is not None:
                raise error

    def end(self) -> None:
        """The server closed the stream without an error; raises Unavailable where it forgot to finish a choice."""
        if not self.complete:
            raise Unavailable("the stream ended before the output was finished")

    def _choice(self, index: int) -> _Choice:
        if index >= self._asked:
            raise Unavailable(f"the server sent choice {index}, and only {self._asked} were asked for")
        return self._choices[index]


class _Choice:
    """One choice while it arrives; joined only when somebody asks, since deltas are many."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finished: Finished | None = None

    def output(self, index: int) -> Output:
        return Output(index, "".join(self.pieces), tuple(self.token_ids), self.finished, tuple(self.logprobs))
