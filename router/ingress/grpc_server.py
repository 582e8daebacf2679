"""`headrace.v1.Inference`, health and reflection on grpc.aio, inside the router's process (DESIGN section 7).

Messages arrive here as bytes and are parsed in the handler: a message that is not valid protobuf, or holds text that is
not UTF-8, is then the caller's INVALID_ARGUMENT like any other bad input, not the library's INTERNAL.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from headrace.errors import BodyTooLarge, Cancelled, HeadraceError, InvalidRequest, UnknownRequest
from headrace.events import Event, Finished
from headrace.undecodable import undecodable
from headrace.v1 import inference_pb2 as pb
from headrace.wire import (
    MAX_MESSAGE_BYTES,
    ChatCall,
    GenerateCall,
    chat_request_from_proto,
    error_from_finish,
    event_to_proto,
    generate_request_from_proto,
    status_from_error,
)
from router.admission.call import Call, ChatPrompt, Prompt, TextPrompt, TokenPrompt
from router.ingress.asgi_exchange import checked_request_id
from router.service import RouterService

SERVICE = "headrace.v1.Inference"
HEALTH_INTERVAL_S = 0.5
DEFAULT_TENANT = "default"
ABORT_LIMIT_S = 5.0

_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 1),
    # Clients behind NAT ping idle connections; the library's default calls that abuse after two pings in five minutes.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    # And finds out about clients whose machine vanished, so that their requests do not run on for nobody.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)

log = logging.getLogger(__name__)

_M = TypeVar("_M", bound=Message)
Context = Any
"""`grpc.aio.ServicerContext`; the library's own annotations do not fit its coroutine style."""


class InferenceServicer:
    """Each method: bytes in, plain call, service, events out."""

    def __init__(self, service: RouterService) -> None:
        self._service = service

    async def generate(self, raw: bytes, context: Context) -> None:
        with self._service.noting_refusals():
            request = generate_request_from_proto(self._parse(pb.GenerateRequest, raw))
            prompt = request.prompt
            given: Prompt = TextPrompt(prompt) if isinstance(prompt, str) else TokenPrompt(prompt)
            call = _call(request, given, context, "prompt")
        await self._stream(call, context)

    async def chat(self, raw: bytes, context: Context) -> None:
        with self._service.noting_refusals():
            request = chat_request_from_proto(self._parse(pb.ChatRequest, raw))
            call = _call(request, ChatPrompt(request.messages), context, "messages")
        await self._stream(call, context)

    async def cancel(self, raw: bytes, _: Context) -> pb.CancelResponse:
        request = self._parse(pb.CancelRequest, raw)
        if not request.request_id:
            raise InvalidRequest("request_id must not be empty", field="request_id")
        found = await self._service.cancel(request.request_id)
        if found is None:
            raise UnknownRequest("there is no such request, or its result has expired", field="request_id")
        return pb.CancelResponse(cancelled=found)

    async def list_models(self, _: bytes, __: Context) -> pb.ListModelsResponse:
        limits = self._service.limits
        return pb.ListModelsResponse(models=[pb.Model(id=limits.name, max_context_tokens=limits.max_context)])

    def _parse(self, kind: type[_M], raw: bytes) -> _M:
        limit = self._service.config.max_body_bytes
        if len(raw) > limit:
            raise BodyTooLarge(f"the message is larger than {limit} bytes")
        try:
            return kind.FromString(raw)
        except DecodeError:
            raise undecodable(kind, raw) from None

    async def _stream(self, call: Call, context: Context) -> None:
        async with await self._service.submit(call) as stream:
            async for event in stream:
                error = error_from_finish(event) if isinstance(event, Finished) else None
                await self._write(context, event)
                if error is not None:
                    raise error

    async def _write(self, context: Context, event: Event) -> None:
        """Raises Cancelled for a reader that keeps its call open and takes nothing: it must not hold a place."""
        limit_s = self._service.config.stall_limit_s
        try:
            async with asyncio.timeout(limit_s):
                await context.write(event_to_proto(event))
        except TimeoutError:
            raise Cancelled(f"the reader took nothing for {limit_s:g} s") from None


def _call(request: GenerateCall | ChatCall, prompt: Prompt, context: Context, prompt_field: str) -> Call:
    remaining_s = context.time_remaining()
    return Call(
        model=request.model,
        prompt=prompt,
        sampling=request.sampling,
        deadline_ms=None if remaining_s is None else max(1, int(remaining_s * 1000)),
        tenant=DEFAULT_TENANT,
        client_request_id=_client_request_id(context),
        prompt_field=prompt_field,
        grammar_field=f"grammar.{request.sampling.grammar.kind}" if request.sampling.grammar else "grammar",
        n=request.n,
        best_of=request.best_of,
        priority=request.priority,
    )


def _client_request_id(context: Context) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == "x-request-id":
            return checked_request_id(value.encode("latin-1", "replace") if isinstance(value, str) else value)
    return ""


def _told(work: Callable[[bytes, Context], Awaitable[Any]]) -> Callable[[bytes, Context], Awaitable[Any]]:
    """Tells errors by the one table; a fault of ours is logged and told without its inside."""

    async def method(raw: bytes, context: Context) -> Any:
        try:
            return await work(raw, context)
        except HeadraceError as error:
            told = error
        except Exception:
            log.exception("a call failed")
            told = HeadraceError("the router could not answer this request")
        return await _abort(context, told)

    return method


async def _abort(context: Context, error: HeadraceError) -> None:
    status = status_from_error(error)
    # The status waits behind what was written before it. A reader that takes nothing gets it when it reads again;
    # nobody here waits for that.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ABORT_LIMIT_S):
            await context.abort(status.code, status.message, trailing_metadata=status.metadata)


def _not_yet(sentence: str) -> Callable[[bytes, Context], Awaitable[NoReturn]]:
    async def method(_: bytes, context: Context) -> NoReturn:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, sentence)
        raise AssertionError("abort raises")

    return method


def _handlers(servicer: InferenceServicer) -> Any:
    def stream(method: Callable[[bytes, Context], Awaitable[Any]]) -> Any:
        return grpc.unary_stream_rpc_method_handler(method, response_serializer=pb.GenerateEvent.SerializeToString)

    def unary(method: Callable[[bytes, Context], Awaitable[Any]]) -> Any:
        return grpc.unary_unary_rpc_method_handler(_told(method), response_serializer=lambda m: m.SerializeToString())

    return grpc.method_handlers_generic_handler(
        SERVICE,
        {
            "Generate": stream(_told(servicer.generate)),
            "Chat": stream(_told(servicer.chat)),
            "Cancel": unary(servicer.cancel),
            "ListModels": unary(servicer.list_models),
            "Attach": stream(_not_yet("re-attaching to a stream is not offered yet: a dropped stream is cancelled")),
            "WatchCapacity": stream(_not_yet("watching capacity is not offered yet: read /metrics instead")),
        },
    )


class GrpcServer:
    """Start, then stop; `port` is the real one also where 0 was asked for."""

    def __init__(self, service: RouterService, host: str, port: int) -> None:
        self._service = service
        # Well above the limit that the handler tells in our own words.
        most_bytes = max(MAX_MESSAGE_BYTES, 2 * service.config.max_body_bytes)
        self._server = grpc.aio.server(options=(*_OPTIONS, ("grpc.max_receive_message_length", most_bytes)))
        self._server.add_generic_rpc_handlers((_handlers(InferenceServicer(service)),))
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            self.port: int = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise HeadraceError(f"cannot listen for gRPC on {address}") from error
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when connections are accepted and health has been told once."""
        await self._tell_health()
        await self._server.start()
        self._watch = asyncio.create_task(self._keep_telling_health())

    async def stop(self, grace_s: float) -> None:
        """NOT_SERVING and a closed listener at once; streams get `grace_s` to end."""
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)

    async def _keep_telling_health(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            await self._tell_health()

    async def _tell_health(self) -> None:
        serving = (await self._service.readiness()).serving
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE):
            await self._health.set(name, status)
