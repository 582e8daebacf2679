"""Proves that a port is free before routers share it.

Routers bind with SO_REUSEPORT, so a stale process on the same port would not fail the start: it would silently
take half of the new connections. A plain bind without the option fails in that case.
"""

from __future__ import annotations

import errno
import socket
import time

from cluster.errors import OperatorError, PortInUse


def require_free(host: str, port: int, flag: str) -> None:
    """Raises `PortInUse` naming the port and `flag`, `OperatorError` where nothing could ever listen."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # Without it, connections of an earlier life in TIME_WAIT would count as a listener.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except socket.gaierror as error:
        raise OperatorError(f"--host {host!r} is not an address of this machine: {error.strerror}") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"port {port} on {host} is in use by another process; choose another with {flag}"
            ) from error
        raise OperatorError(f"cannot listen on {host}:{port} ({flag}): {error.strerror}") from error


def reachable_host(host: str) -> str:
    """Where a client on this machine finds a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def answers(host: str, port: int, timeout_s: float) -> bool:
    """Whether something accepts connections there within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((reachable_host(host), port), timeout=left_s):
                return True
        except OSError:
            time.sleep(min(0.05, left_s))
    return False
