"""OpenAI's `/v1/completions` as server-sent events: works against headrace, vLLM and anything that speaks it.

Chunks carry text, so how many tokens one brought must be told otherwise. headrace says it in the event's id,
`<request>:<choice>:<token index>` of the newest token so far. For other servers a chunk with text counts as one token,
and the `usage` of the last chunk puts that right: tokens that came without text, or several in one chunk, count then.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp

from benchmarks.errors import BenchError, CallFailed
from benchmarks.sse import Event, EventReader
from benchmarks.transports import TokenDelta
from benchmarks.workload import Call

DONE = "[DONE]"
CONNECT_TIMEOUT_S = 10.0


class OpenAITransport:
    """One connection pool without a limit: the load, not the pool, says how many streams are open."""

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url.rstrip("/").removesuffix("/v1")
        self._model = ""
        self._session: aiohttp.ClientSession | None = None

    async def open(self, model: str) -> str:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)
        self._model = model or await self._first_model(self._session)
        return self._model

    async def _first_model(self, session: aiohttp.ClientSession) -> str:
        url = f"{self._base_url}/v1/models"
        try:
            async with session.get(url, timeout=aiohttp.ClientTimeout(total=CONNECT_TIMEOUT_S)) as answer:
                answer.raise_for_status()
                return str((await answer.json(content_type=None))["data"][0]["id"])
        except aiohttp.ClientResponseError as error:
            raise BenchError(f"{url} answered {error.status}: is this an OpenAI-compatible server?") from None
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise BenchError(
                f"cannot reach {url}: {error or 'timed out'}; is the cluster up (`headrace up`)?"
            ) from None
        except (LookupError, TypeError):
            raise BenchError(f"{url} lists no model") from None

    async def stream(self, call: Call) -> AsyncGenerator[TokenDelta, None]:
        assert self._session is not None, "open() comes first"
        try:
            async with self._session.post(f"{self._base_url}/v1/completions", json=self._body(call)) as answer:
                if answer.status != 200:
                    raise CallFailed(f"http_{answer.status}", _message_of(await answer.text()))
                async for delta in _deltas(answer.content):
                    yield delta
        except (aiohttp.ClientError, ConnectionError) as error:
            raise CallFailed("connection", str(error) or type(error).__name__) from None

    def _body(self, call: Call) -> dict[str, object]:
        return {
            "model": self._model,
            "prompt": list(call.prompt_token_ids),
            "max_tokens": call.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


async def _deltas(content: aiohttp.StreamReader) -> AsyncGenerator[TokenDelta, None]:
    reader, seen = EventReader(), 0
    while piece := await content.readany():
        for event in reader.feed(piece):
            if event.data == DONE:
                return
            count = _new_tokens(event, seen)
            seen += count
            if count:
                yield TokenDelta(count)
    raise CallFailed("stream_cut", f"the stream ended without {DONE}")


def _new_tokens(event: Event, seen: int) -> int:
    """How many output tokens one chunk brings. Raises CallFailed for an error event and for what is no chunk at all."""
    try:
        chunk: Any = json.loads(event.data)
        if chunk.get("error"):
            raise CallFailed("stream_error", _message_of(event.data))
        if chunk.get("usage"):
            known = int(chunk["usage"]["completion_tokens"])
        elif (newest := _token_index(event.id)) is not None:
            known = newest + 1
        else:
            known = seen + sum(1 for choice in chunk.get("choices") or () if choice.get("text"))
    except (ValueError, LookupError, TypeError, AttributeError):
        raise CallFailed("bad_chunk", event.data[:200]) from None
    return max(0, known - seen)


def _token_index(event_id: str) -> int | None:
    """Of headrace's own event ids; None for any other, or none."""
    *_, choice, index = ("", "", *event_id.split(":"))
    return int(index) if choice.isdecimal() and index.isdecimal() else None


def _message_of(body: str) -> str:
    """The message in OpenAI's error shape, else the start of the body."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body[:200]
