"""headrace: serve large language models on a Ray cluster.

This package is the contract between clients, routers and workers, and the Python client. Importing it loads nothing
heavy: each public name is fetched when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.aio import AsyncClient as AsyncClient
    from headrace.aio import AsyncStream as AsyncStream
    from headrace.answer import Output as Output
    from headrace.client import Client as Client
    from headrace.client import Stream as Stream
    from headrace.connection import Tls as Tls
    from headrace.errors import HeadraceError as HeadraceError
    from headrace.events import Accepted as Accepted
    from headrace.events import Delta as Delta
    from headrace.events import Finished as Finished
    from headrace.events import PromptLogprobs as PromptLogprobs
    from headrace.logprobs import TokenLogprob as TokenLogprob
    from headrace.sampling import SamplingParams as SamplingParams

_HOME = {
    "Accepted": "events",
    "AsyncClient": "aio",
    "AsyncStream": "aio",
    "Client": "client",
    "Delta": "events",
    "Finished": "events",
    "HeadraceError": "errors",
    "Output": "answer",
    "PromptLogprobs": "events",
    "SamplingParams": "sampling",
    "Stream": "client",
    "Tls": "connection",
    "TokenLogprob": "logprobs",
}
__all__ = tuple(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    return getattr(import_module(f"headrace.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
