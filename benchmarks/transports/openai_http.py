"""OpenAI's `/v1/completions` as server-sent events: works against headrace, vLLM and anything that speaks it.

A chunk counts the tokens in its `token_ids` where the server tells them, else one if it carries text. A server
that tells neither for a token (half a character, coalesced text) is put right by the `usage` of the last chunk: what is
missing is counted when that arrives.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp

from benchmarks.errors import BenchError, CallFailed
from benchmarks.sse import EventReader
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
            count = _new_tokens(event.data, seen)
            seen += count
            if count:
                yield TokenDelta(count)
    raise CallFailed("stream_cut", f"the stream ended without {DONE}")


def _new_tokens(data: str, seen: int) -> int:
    """How many output tokens one chunk brings. Raises CallFailed for an error event and for what is no chunk at all."""
    try:
        chunk: Any = json.loads(data)
        if chunk.get("error"):
            raise CallFailed("stream_error", _message_of(data))
        count = sum(_choice_tokens(choice) for choice in chunk.get("choices") or ())
        usage = chunk.get("usage")
        if usage:
            count += max(0, usage["completion_tokens"] - seen - count)
    except (ValueError, LookupError, TypeError, AttributeError):
        raise CallFailed("bad_chunk", data[:200]) from None
    return count


def _choice_tokens(choice: dict[str, Any]) -> int:
    ids = choice.get("token_ids")
    if ids is not None:
        return len(ids)
    return 1 if choice.get("text") else 0


def _message_of(body: str) -> str:
    """The message in OpenAI's error shape, else the start of the body."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body[:200]
