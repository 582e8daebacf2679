"""Errors in OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`, with status and time of one table."""

from __future__ import annotations

import json
import math

from headrace.errors import HeadraceError, TooLong, UnknownModel

MAX_MESSAGE_CHARS = 2_000
"""Error bodies stay small whatever was sent; messages of ours are far shorter."""

_OPENAI_CODES: dict[type[HeadraceError], str] = {TooLong: "context_length_exceeded", UnknownModel: "model_not_found"}

Headers = list[tuple[bytes, bytes]]


def error_object(error: HeadraceError) -> dict[str, object]:
    return {
        "error": {
            "message": error.message[:MAX_MESSAGE_CHARS],
            "type": error.status.openai_type,
            "param": error.field,
            "code": _OPENAI_CODES.get(type(error)),
        }
    }


def error_response(error: HeadraceError) -> tuple[int, Headers, bytes]:
    """Status, headers and body."""
    headers: Headers = [(b"content-type", b"application/json")]
    if error.retry_after_s is not None:
        # Whole seconds, rounded up: coming back early is what the client was asked not to do.
        headers.append((b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode()))
    return error.status.http, headers, json.dumps(error_object(error)).encode()


def plain_error(status: int, message: str) -> tuple[int, Headers, bytes]:
    """For what HTTP itself refuses (no such path or method), before there is a request of ours."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": None}}
    return status, [(b"content-type", b"application/json")], json.dumps(body).encode()
