"""The synchronous Python client.

    with Client("127.0.0.1:50051") as client:
        for delta in client.chat([{"role": "user", "content": "Hello"}], max_tokens=64):
            print(delta.text, end="", flush=True)

Needs grpcio and protobuf only. `headrace.aio.AsyncClient` is the same for asyncio.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import grpc

from headrace.answer import Output, StreamFold
from headrace.connection import (
    DEFAULT_ADDRESS,
    MIN_CHANNELS,
    UNARY_TIMEOUT_S,
    Tls,
    channel_options,
    error_from_call,
)
from headrace.events import Accepted, Delta, Finished, PromptLogprobs
from headrace.v1 import inference_pb2 as pb
from headrace.v1.inference_pb2_grpc import InferenceStub
from headrace.wire import MAX_MESSAGE_BYTES, ModelInfo, chat_request_to_proto, generate_request_to_proto


class Stream:
    """One request's output. Iterating yields the deltas of all its choices as they come; closing or dropping it before
    the end cancels the request.

    Reading raises the error tree of `headrace.errors`: a refusal with the first read, a failure when it happens.
    """

    def __init__(self, call: Any, choices: int = 1) -> None:
        self._call = call
        self._fold = StreamFold(choices)

    @property
    def request_id(self) -> str:
        """Waits until the server has accepted (or refused) the request."""
        return self.accepted.request_id

    @property
    def accepted(self) -> Accepted:
        """Waits until the server has accepted (or refused) the request."""
        while self._fold.accepted is None:
            self._read()
        return self._fold.accepted

    @property
    def finished(self) -> Finished | None:
        """How choice 0 ended and what it used; None while it runs. `outputs` tells it of every choice."""
        return self._fold.finished

    @property
    def outputs(self) -> tuple[Output, ...]:
        """Of each choice, by its index, what has come so far; does not wait."""
        return self._fold.outputs

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """Where they were asked for: there once the first delta is; does not wait."""
        return self._fold.prompt_logprobs

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        while not self._fold.pending:
            self._read()
        return self._fold.pending.popleft()

    def text(self) -> str:
        """Reads to the end; the whole text of choice 0, including what was iterated over before."""
        return (self.results())[0].text

    def results(self) -> tuple[Output, ...]:
        """Reads to the end; every choice by its index, including what was iterated over before."""
        for _ in self:
            pass
        return self.outputs

    def cancel(self) -> None:
        """Ends the request at the server; a reader gets `Cancelled`. Safe from another thread, and after the end."""
        self._call.cancel()

    close = cancel

    def _read(self) -> None:
        """Takes one message. Raises StopIteration after the last."""
        try:
            message = next(self._call)
        except StopIteration:
            self._fold.end()
            raise
        except grpc.RpcError as fault:
            raise error_from_call(fault) from fault
        self._fold.take(message)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # At interpreter exit the library may be gone already; then the connection closes, which cancels too.
        with contextlib.suppress(Exception):
            self._call.cancel()


class Client:
    """Talks to the routers behind one address; safe to share between threads.

    Sampling parameters are those of `headrace.sampling.SamplingParams`; only the ones given are sent, and the
    server's bounds are the ones that count.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        tls: Tls | None = None,
        *,
        channels: int = MIN_CHANNELS,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        """Connects with the first call, not here. `tls` None speaks plain text."""
        options = channel_options(max_message_bytes)
        self._channels = [
            grpc.insecure_channel(address, options)
            if tls is None
            else grpc.secure_channel(address, tls.credentials(), options)
            for _ in range(max(MIN_CHANNELS, channels))
        ]
        self._stubs: list[Any] = [InferenceStub(channel) for channel in self._channels]  # type: ignore[no-untyped-call]
        self._turns = itertools.cycle(range(len(self._stubs)))

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        model: str = "",
        timeout_s: float | None = None,
        n: int = 1,
        best_of: int | None = None,
        priority: int | None = None,
        **sampling: object,
    ) -> Stream:
        """Continues a prompt, given as text or as token ids, `n` times. Past `timeout_s` the server ends it
        (DeadlineExceeded).

        Raises InvalidRequest here for values that no message can hold, TypeError for an unknown sampling parameter.
        """
        request = generate_request_to_proto(prompt, model, sampling, n=n, best_of=best_of, priority=priority)
        return Stream(self._stub().Generate(request, timeout=timeout_s), n)

    def chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        model: str = "",
        timeout_s: float | None = None,
        n: int = 1,
        best_of: int | None = None,
        priority: int | None = None,
        **sampling: object,
    ) -> Stream:
        """Answers a conversation of `{"role": …, "content": …}` messages; otherwise as `generate`."""
        request = chat_request_to_proto(messages, model, sampling, n=n, best_of=best_of, priority=priority)
        return Stream(self._stub().Chat(request, timeout=timeout_s), n)

    def models(self) -> tuple[ModelInfo, ...]:
        """The models that are served. Raises Unavailable where nobody answers."""
        reply = self._unary("ListModels", pb.ListModelsRequest())
        return tuple(ModelInfo(model.id, model.max_context_tokens) for model in reply.models)

    def cancel(self, request_id: str) -> bool:
        """Ends a request by its id, through any router; False when it had ended otherwise. Raises UnknownRequest."""
        return bool(self._unary("Cancel", pb.CancelRequest(request_id=request_id)).cancelled)

    def close(self) -> None:
        """Closes the connections, which cancels what still runs on them."""
        for channel in self._channels:
            channel.close()

    def _stub(self) -> Any:
        return self._stubs[next(self._turns)]

    def _unary(self, method: str, request: object) -> Any:
        try:
            return getattr(self._stub(), method)(request, timeout=UNARY_TIMEOUT_S)
        except grpc.RpcError as fault:
            raise error_from_call(fault) from fault

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
