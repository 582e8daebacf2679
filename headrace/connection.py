"""What the synchronous and the asyncio client share: how to connect, and how a failed call becomes an error."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from headrace.wire import MAX_MESSAGE_BYTES, error_from_status

DEFAULT_ADDRESS = "127.0.0.1:50051"
MIN_CHANNELS = 2
"""Routers of one node share a port *per connection*: with one connection a client would only ever meet one router."""
UNARY_TIMEOUT_S = 10.0
"""How long `models` and `cancel` wait for their answer."""


@dataclass(frozen=True)
class Tls:
    """Certificates as PEM files. Without `ca_file` the system's roots count; the other two are for mutual TLS."""

    ca_file: str | Path | None = None
    cert_file: str | Path | None = None
    key_file: str | Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises OSError where a file cannot be read."""
        files = (self.ca_file, self.key_file, self.cert_file)
        ca, key, cert = (None if file is None else Path(file).read_bytes() for file in files)
        return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=cert)


def channel_options(max_message_bytes: int = MAX_MESSAGE_BYTES) -> list[tuple[str, int]]:
    """gRPC shares one connection among a process' equal channels unless each has a subchannel pool of its own."""
    return [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
    ]


def error_from_call(fault: Any) -> Exception:
    """The error behind a `grpc.RpcError` or `grpc.aio.AioRpcError`: both know code, details and trailing metadata."""
    return error_from_status(fault.code(), fault.details() or "", fault.trailing_metadata() or ())
