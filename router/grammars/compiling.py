"""One child process, asked over pipes by one thread at a time, and killed when it takes too long."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import subprocess
import sys
import time

from headrace.grammar import GrammarFault
from headrace.sampling import Grammar

START_LIMIT_S = 60.0
"""For a child to load its tokenizer, on a machine that has much else to do."""
CHILD = (sys.executable, "-m", "router.grammars.child")
_QUIET = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
"""One thread is enough, and each more would take of the address space it is allowed."""

logger = logging.getLogger(__name__)


class ChildLost(Exception):
    """The child is gone, or has not come up."""


class CompilingChild:
    """Owned by one thread, but for `kill`. The process starts with the first question and is replaced after a kill."""

    def __init__(self, model_path: str, limit_s: float, command: tuple[str, ...] = CHILD) -> None:
        self._limit_s = limit_s
        self._command = (*command, str(limit_s), model_path)
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""
        self._closed = False

    def reason_against(self, grammar: Grammar) -> str:
        """Why it cannot be carried out, "" where it can. Raises GrammarFault for one that takes too long or ends the
        child, ChildLost where no child comes up.
        """
        process = self.start()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps([grammar.kind, grammar.text]).encode() + b"\n")
            process.stdin.flush()
            return self._line(process, self._limit_s)
        except TimeoutError:
            self.end()
            raise GrammarFault(f"too complex: not compiled within {self._limit_s:g} s") from None
        except (OSError, ChildLost):
            self.end()
            raise GrammarFault("too complex: compiling it ended the process that tried") from None

    def start(self) -> subprocess.Popen[bytes]:
        """Makes sure of a child that has loaded the tokenizer. Raises ChildLost."""
        process = self._process
        if process is not None and process.poll() is None:
            return process
        self.end()
        # The child finds the same packages, whatever made them importable here.
        path = os.pathsep.join(entry for entry in sys.path if entry)
        environment = {**os.environ, **_QUIET, "PYTHONPATH": path}
        # A session of its own: an interrupt typed at the router's terminal is not for it.
        process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )
        self._process = process
        try:
            if self._closed:
                raise ChildLost("this router is going")
            self._line(process, START_LIMIT_S)
        except (TimeoutError, OSError, ChildLost) as fault:
            self.end()
            logger.error("no process comes up that could compile grammars")
            raise ChildLost("no process comes up that could compile grammars") from fault
        return process

    def kill(self) -> None:
        """From any thread: whoever waits for the child is told that it is gone, and no other is started."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()

    def end(self) -> None:
        """Kills the child, if there is one, and waits for its end."""
        if self._process is None:
            return
        process, self._process, self._unread = self._process, None, b""
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            # Closing flushes what the child was not told any more.
            with contextlib.suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()

    def _line(self, process: subprocess.Popen[bytes], limit_s: float) -> str:
        """The child's next line, within `limit_s` seconds. Raises TimeoutError, ChildLost at its end."""
        assert process.stdout is not None
        descriptor = process.stdout.fileno()
        until_s = time.monotonic() + limit_s
        while b"\n" not in self._unread:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            if not poll.poll(max(0.0, until_s - time.monotonic()) * 1000):
                raise TimeoutError
            piece = os.read(descriptor, 1 << 16)
            if not piece:
                raise ChildLost("it has ended")
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return str(json.loads(line))
