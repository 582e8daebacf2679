"""The asyncio Python client.

    async with AsyncClient("127.0.0.1:50051") as client:
        async for delta in client.generate("Once upon a time", max_tokens=64):
            print(delta.text, end="", flush=True)

Needs grpcio and protobuf only. `headrace.client.Client` is the same without asyncio.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from headrace.answer import Output, StreamFold
from headrace.connection import (
    DEFAULT_ADDRESS,
    MIN_CHANNELS,
    UNARY_TIMEOUT_S,
    Tls,
    channel_options,
    error_from_call,
)
from headrace.errors import Cancelled
from headrace.events import Accepted, Delta, Finished, PromptLogprobs
from headrace.v1 import inference_pb2 as pb
from headrace.v1.inference_pb2_grpc import InferenceStub
from headrace.wire import MAX_MESSAGE_BYTES, ModelInfo, chat_request_to_proto, generate_request_to_proto


class AsyncStream:
    """One request's output. Iterating yields the deltas of all its choices as they come; closing or dropping it before
    the end cancels the request.

    Cancelling the task that reads cancels the request too. Reading raises the error tree of `headrace.errors`.
    """

    def __init__(self, call: Any, choices: int = 1) -> None:
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._fold = StreamFold(choices)

    async def accepted(self) -> Accepted:
        """Waits until the server has accepted (or refused) the request."""
        while self._fold.accepted is None:
            await self._read()
        return self._fold.accepted

    @property
    def request_id(self) -> str:
        """ "" until the first event has been read; `await accepted()` waits for it."""
        return "" if self._fold.accepted is None else self._fold.accepted.request_id

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

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        while not self._fold.pending:
            await self._read()
        return self._fold.pending.popleft()

    async def text(self) -> str:
        """Reads to the end; the whole text of choice 0, including what was iterated over before."""
        return (await self.results())[0].text

    async def results(self) -> tuple[Output, ...]:
        """Reads to the end; every choice by its index, including what was iterated over before."""
        async for _ in self:
            pass
        return self.outputs

    def cancel(self) -> None:
        """Ends the request at the server; a reader gets `Cancelled`. Does nothing after the end."""
        self._call.cancel()

    close = cancel

    async def _read(self) -> None:
        """Takes one message. Raises StopAsyncIteration after the last."""
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as fault:
            raise error_from_call(fault) from fault
        except asyncio.CancelledError as fault:
            # grpc.aio uses this for a call cancelled by its own client as well; only a cancelled *task* may see it.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise Cancelled("the client cancelled the request") from fault
        if message is grpc.aio.EOF:
            self._fold.end()
            raise StopAsyncIteration
        self._fold.take(message)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # grpc.aio's own tasks keep a call alive that nobody reads. Garbage may be collected on any thread.
        loop = getattr(self, "_loop", None)
        if loop is not None and not loop.is_closed() and not self._fold.complete:
            with contextlib.suppress(RuntimeError):  # closed between the two lines
                loop.call_soon_threadsafe(self._call.cancel)


class AsyncClient:
    """Talks to the routers behind one address, on the event loop of its first call.

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
        """`tls` None speaks plain text."""
        self._address = address
        self._credentials = None if tls is None else tls.credentials()
        self._options = channel_options(max_message_bytes)
        self._size = max(MIN_CHANNELS, channels)
        self._channels: list[grpc.aio.Channel] = []
        self._stubs: list[Any] = []
        self._turns = itertools.cycle(range(self._size))

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
    ) -> AsyncStream:
        """Continues a prompt, given as text or as token ids, `n` times. Past `timeout_s` the server ends it
        (DeadlineExceeded).

        Raises InvalidRequest here for values that no message can hold, TypeError for an unknown sampling parameter.
        """
        request = generate_request_to_proto(prompt, model, sampling, n=n, best_of=best_of, priority=priority)
        return AsyncStream(self._stub().Generate(request, timeout=timeout_s), n)

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
    ) -> AsyncStream:
        """Answers a conversation of `{"role": …, "content": …}` messages; otherwise as `generate`."""
        request = chat_request_to_proto(messages, model, sampling, n=n, best_of=best_of, priority=priority)
        return AsyncStream(self._stub().Chat(request, timeout=timeout_s), n)

    async def models(self) -> tuple[ModelInfo, ...]:
        """The models that are served. Raises Unavailable where nobody answers."""
        reply = await self._unary("ListModels", pb.ListModelsRequest())
        return tuple(ModelInfo(model.id, model.max_context_tokens) for model in reply.models)

    async def cancel(self, request_id: str) -> bool:
        """Ends a request by its id, through any router; False when it had ended otherwise. Raises UnknownRequest."""
        return bool((await self._unary("Cancel", pb.CancelRequest(request_id=request_id))).cancelled)

    async def close(self) -> None:
        """Closes the connections, which cancels what still runs on them."""
        channels, self._channels, self._stubs = self._channels, [], []
        for channel in channels:
            await channel.close()

    def _stub(self) -> Any:
        # A channel belongs to the loop that is running when it is made.
        if not self._stubs:
            self._channels = [self._open() for _ in range(self._size)]
            self._stubs = [InferenceStub(channel) for channel in self._channels]  # type: ignore[no-untyped-call]
        return self._stubs[next(self._turns)]

    def _open(self) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(self._address, self._options)
        return grpc.aio.secure_channel(self._address, self._credentials, self._options)

    async def _unary(self, method: str, request: object) -> Any:
        try:
            return await getattr(self._stub(), method)(request, timeout=UNARY_TIMEOUT_S)
        except grpc.aio.AioRpcError as fault:
            raise error_from_call(fault) from fault

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
