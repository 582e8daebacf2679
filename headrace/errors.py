"""Every error a client can see, with its gRPC code, HTTP status and retry advice in one table.

An error says what was wrong (`message`), where (`field`, when the caller's input is at fault) and when to try again
(`retry_after_s`, when waiting helps). Errors survive pickling, so they may cross process borders as they are.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Status:
    """How one error class is told to the two kinds of client."""

    grpc: str
    """Name of the `grpc.StatusCode` member."""
    http: int
    openai_type: str
    """The `error.type` of OpenAI's error body."""


class HeadraceError(Exception):
    """The root of the tree; raised directly for a fault of ours that has no better name."""

    status = Status("INTERNAL", 500, "server_error")

    def __init__(self, message: str, *, field: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.field, self.retry_after_s))


def _rebuild(kind: type[HeadraceError], message: str, field: str | None, retry_after_s: float | None) -> HeadraceError:
    return kind(message, field=field, retry_after_s=retry_after_s)


class InvalidRequest(HeadraceError):
    """The request can never succeed as it stands; `field` names the part to change."""

    status = Status("INVALID_ARGUMENT", 400, "invalid_request_error")


class TooLong(InvalidRequest):
    """Prompt and output exceed the context or what any worker's KV pool could hold."""


class Unauthenticated(HeadraceError):
    status = Status("UNAUTHENTICATED", 401, "authentication_error")


class UnknownModel(HeadraceError):
    status = Status("NOT_FOUND", 404, "invalid_request_error")


class UnknownRequest(HeadraceError):
    status = Status("NOT_FOUND", 404, "invalid_request_error")


class BodyTooLarge(InvalidRequest):
    status = Status("INVALID_ARGUMENT", 413, "invalid_request_error")


class Overloaded(HeadraceError):
    """A cap was reached or the wait would exceed the deadline; `retry_after_s` follows the drain, once measured."""

    status = Status("RESOURCE_EXHAUSTED", 429, "rate_limit_error")


class Unavailable(HeadraceError):
    """The store or every worker is away; nothing was admitted."""

    status = Status("UNAVAILABLE", 503, "server_error")


class DeadlineExceeded(HeadraceError):
    status = Status("DEADLINE_EXCEEDED", 504, "timeout_error")


class Cancelled(HeadraceError):
    status = Status("CANCELLED", 499, "cancelled")


class Moved(HeadraceError):
    """Another router owns the stream now; attach there."""

    status = Status("ABORTED", 409, "moved")


class RequestFailed(HeadraceError):
    """The engine ended this one request (NaN logits, poison, …); the message says why."""


@dataclass(frozen=True)
class ErrorRow:
    name: str
    grpc: str
    http: int
    openai_type: str


def tree(root: type[HeadraceError] = HeadraceError) -> tuple[type[HeadraceError], ...]:
    """Every class of the tree that clients can see, parents before children. (Subclasses elsewhere, such as a worker's
    "out of memory" at start, are told to operators as their parent.)"""
    children = (child for child in root.__subclasses__() if child.__module__ == __name__)
    return (root, *(kind for child in children for kind in tree(child)))


def table() -> tuple[ErrorRow, ...]:
    """The whole tree as rows, for the docs and for the test that keeps them equal."""
    return tuple(ErrorRow(k.__name__, k.status.grpc, k.status.http, k.status.openai_type) for k in tree())
