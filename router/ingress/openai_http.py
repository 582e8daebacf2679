"""OpenAI's HTTP endpoints on the service, and what probes and Prometheus ask.

Everything that can be refused is refused before the status line goes out, also for streams. The body is taken as JSON
whatever its Content-Type says, as curl users expect.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.detokenizer import IncrementalDetokenizer
from headrace.errors import HeadraceError
from headrace.events import Accepted, Delta, Finished, PromptLogprobs
from headrace.wire import error_from_finish
from router.admission.call import Prompt, TextPrompt, TokenPrompt
from router.delivery.stream import RequestStream
from router.ingress.asgi_exchange import (
    BodyTooSlow,
    ClientGone,
    EventStream,
    client_request_id,
    read_body,
    respond,
    until_disconnect,
)
from router.ingress.http_errors import error_object, error_response, plain_error
from router.ingress.openai_render import Answer, Rendering
from router.ingress.openai_schema import ChatBody, CompletionBody, parse_body
from router.service import RouterService

DEFAULT_TENANT = "default"
MAX_HEAD_BYTES = 32 << 10
"""Path, query and headers together."""

log = logging.getLogger(__name__)


class GenerationEndpoint:
    """The ASGI application of one POST endpoint."""

    def __init__(self, service: RouterService, body: type[ChatBody] | type[CompletionBody]) -> None:
        self._service = service
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = EventStream(send)
        try:
            client_id = client_request_id(scope)
            raw = await read_body(receive, self._service.config.max_body_bytes)
            await until_disconnect(receive, self._answer(raw, client_id, events, send))
        except ClientGone:
            return
        except BodyTooSlow:
            await respond(send, *plain_error(408, "the body did not arrive in time"))
        except HeadraceError as error:
            await _tell(error, events, send)
        except Exception:
            log.exception("an exchange failed")
            await _tell(HeadraceError("the router could not answer this request"), events, send)

    async def _answer(self, raw: bytes, client_id: str, events: EventStream, send: Send) -> None:
        with self._service.noting_refusals():
            parsed = parse_body(self._body, raw)
            call = parsed.call(DEFAULT_TENANT, client_id)
        async with await self._service.submit(call) as stream:
            shown = parsed.shown(self._prompt_text(call.prompt) if parsed.echoes else None)
            rendering = Rendering(
                self._service.tokenizer,
                shown,
                chat=isinstance(parsed, ChatBody),
                request_id=stream.request_id,
                created=int(time.time()),
                model=self._service.limits.name,
            )
            headers = [(b"x-request-id", (client_id or stream.request_id).encode())]
            if parsed.stream:
                await events.open(headers)
                await _stream(stream, rendering, events, with_usage=parsed.wants_usage_in_stream)
            else:
                whole = await _collect(stream), _computed_tokens(stream)
                # On another thread where it takes its time: the loop has other streams to serve.
                body = await asyncio.to_thread(rendering.whole, *whole) if shown.is_long else rendering.whole(*whole)
                await respond(send, 200, [(b"content-type", b"application/json"), *headers], body)

    def _prompt_text(self, prompt: Prompt) -> str:
        """What `echo` shows: the text as it was sent, or what the ids stand for. A conversation has none."""
        if isinstance(prompt, TextPrompt):
            return prompt.text
        ids = prompt.token_ids if isinstance(prompt, TokenPrompt) else ()
        return IncrementalDetokenizer(self._service.tokenizer).push(ids)


async def _stream(stream: RequestStream, rendering: Rendering, events: EventStream, *, with_usage: bool) -> None:
    answer = Answer()
    async for event in stream:
        if isinstance(event, Accepted):
            answer.prompt_tokens = event.prompt_tokens
        elif isinstance(event, PromptLogprobs):
            answer.take_prompt(event)
        else:
            if rendering.opens(event.choice):
                await events.event(await asyncio.to_thread(rendering.opening, event.choice, answer))
            await _stream_output(stream.request_id, event, rendering, events)
    if with_usage:
        await events.event(rendering.usage(answer, _computed_tokens(stream)))
    await events.close()


async def _stream_output(request_id: str, event: Delta | Finished, rendering: Rendering, events: EventStream) -> None:
    if isinstance(event, Delta):
        last_index = event.first_index + len(event.token_ids) - 1
        chunk = rendering.delta(event)
    else:
        error = error_from_finish(event)
        if error is not None:
            raise error
        last_index = event.completion_tokens - 1
        chunk = rendering.end(event)
    if chunk:
        await events.event(chunk, f"{request_id}:{event.choice}:{max(last_index, 0)}")


def _computed_tokens(stream: RequestStream) -> int:
    """Of all choices, also of those that only competed to be shown."""
    return sum(choice.next_index for choice in stream.choices)


async def _collect(stream: RequestStream) -> Answer:
    answer = Answer()
    async for event in stream:
        if isinstance(event, Accepted):
            answer.prompt_tokens = event.prompt_tokens
        elif isinstance(event, PromptLogprobs):
            answer.take_prompt(event)
        elif isinstance(event, Delta):
            answer.take(event)
        else:
            error = error_from_finish(event)
            if error is not None:
                raise error
            answer.ends[event.choice] = event
    return answer


async def _tell(error: HeadraceError, events: EventStream, send: Send) -> None:
    if events.opened:
        await events.event(json.dumps(error_object(error)))
        await events.close()
    else:
        await respond(send, *error_response(error))


def build_app(service: RouterService) -> ASGIApp:
    """The application to serve; it holds no state beside the service."""
    pages = _Pages(service)
    routes = [
        Route("/v1/chat/completions", GenerationEndpoint(service, ChatBody), methods=["POST"]),
        Route("/v1/completions", GenerationEndpoint(service, CompletionBody), methods=["POST"]),
        Route("/v1/models", pages.models, methods=["GET"]),
        Route("/v1/models/{name:path}", pages.model, methods=["GET"]),
        Route("/healthz", pages.health, methods=["GET"]),
        Route("/readyz", pages.ready, methods=["GET"]),
        Route("/metrics", pages.metrics, methods=["GET"]),
    ]
    handlers = {HTTPException: _refused_by_http, HeadraceError: _refused}
    return _BoundedHead(Starlette(routes=routes, exception_handlers=handlers))  # type: ignore[arg-type]


class _BoundedHead:
    """Refuses a head that is too long: the parser's own limit only counts heads that come in several pieces."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = len(scope["raw_path"]) + len(scope["query_string"])
        size += sum(len(name) + len(value) for name, value in scope["headers"])
        if size > MAX_HEAD_BYTES:
            await respond(send, *plain_error(431, f"path and headers are longer than {MAX_HEAD_BYTES} bytes"))
        else:
            await self._app(scope, receive, send)


class _Pages:
    def __init__(self, service: RouterService) -> None:
        self._service = service

    async def models(self, _: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: HttpRequest) -> Response:
        if request.path_params["name"] != self._service.limits.name:
            raise HTTPException(404, "there is no model of that name here")
        return JSONResponse(self._model())

    async def health(self, _: HttpRequest) -> Response:
        """Alive: a restart would not help. Says nothing about workers or the store."""
        alive = self._service.alive
        return JSONResponse({"alive": alive}, status_code=200 if alive else 503)

    async def ready(self, _: HttpRequest) -> Response:
        now = await self._service.readiness()
        page = {"ready": now.serving, "store": now.store, "workers": now.workers}
        return JSONResponse(page, status_code=200 if now.serving else 503)

    async def metrics(self, _: HttpRequest) -> Response:
        text = await self._service.exposition()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    def _model(self) -> dict[str, object]:
        service = self._service
        return {
            "id": service.limits.name,
            "object": "model",
            "created": service.started_unix_s,
            "owned_by": "headrace",
            "max_model_len": service.limits.max_context,
        }


async def _refused_by_http(_: HttpRequest, error: HTTPException) -> Response:
    status, headers, body = plain_error(error.status_code, error.detail)
    extra = [(name.encode(), value.encode()) for name, value in (error.headers or {}).items()]
    return _raw_response(status, headers + extra, body)


async def _refused(_: HttpRequest, error: HeadraceError) -> Response:
    return _raw_response(*error_response(error))


def _raw_response(status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> Response:
    return Response(body, status_code=status, headers={k.decode(): v.decode() for k, v in headers})
