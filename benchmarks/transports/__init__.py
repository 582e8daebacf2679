"""How a call reaches the cluster and how its tokens come back. Each transport is one class behind `Transport`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Protocol

from benchmarks.errors import BenchError
from benchmarks.options import BenchOptions
from benchmarks.workload import Call


@dataclass(frozen=True)
class TokenDelta:
    """New output tokens that arrived together. `first_index` is the server's own count, None when it tells none."""

    count: int
    first_index: int | None = None


class Transport(Protocol):
    """One run's connections. Used from one event loop; any number of streams at once."""

    async def open(self, model: str) -> str:
        """Connects and returns the model's name: `model`, or the first the server lists when it is empty.

        Raises BenchError with one line when nobody answers or no such model is there.
        """
        ...

    def stream(self, call: Call) -> AsyncGenerator[TokenDelta, None]:
        """Sends the call and yields its deltas as they arrive. Closing the generator early cancels the call.

        Raises CallFailed, with a kind from the server's own code, when the call ends in any other way than its end.
        """
        ...

    async def close(self) -> None:
        """Ends all connections; safe to repeat."""
        ...


def _grpc(options: BenchOptions) -> Transport:
    from benchmarks.transports.grpc_stream import GrpcTransport

    return GrpcTransport(options.resolved_target)


def _http(options: BenchOptions) -> Transport:
    from benchmarks.transports.openai_http import OpenAITransport

    return OpenAITransport(options.resolved_target)


_TRANSPORTS: dict[str, Callable[[BenchOptions], Transport]] = {"grpc": _grpc, "http": _http}


def make_transport(options: BenchOptions) -> Transport:
    """The transport of `options.api`, not yet connected."""
    try:
        return _TRANSPORTS[options.api](options)
    except ImportError as error:
        raise BenchError(f"--api {options.api} needs the package {error.name}") from None
