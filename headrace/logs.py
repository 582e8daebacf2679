"""Structured logs: one JSON object a line, with the request id where there is one, and never a prompt or its answer.

Nothing in router or worker hands text or token ids to a logger; `extra` fields are ids, counts and durations. What an
exception says is left out, since a library may quote in it whatever it was given.
"""

from __future__ import annotations

import json
import logging
import traceback
from datetime import UTC, datetime

_STANDARD = frozenset(vars(logging.makeLogRecord({})))
MAX_VALUE_CHARS = 200
MAX_CAUSES = 5


class JsonFormatter(logging.Formatter):
    """`{"time", "level", "logger", "message", …extra}`; of an exception its type as `error`, its frames as `trace`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in vars(record).items():
            if name not in _STANDARD and name not in ("message", "asctime", "taskName"):
                line[name] = value if isinstance(value, int | float | None) else str(value)[:MAX_VALUE_CHARS]
        if record.exc_info and record.exc_info[1] is not None:
            line["error"] = type(record.exc_info[1]).__name__
            line["trace"] = _trace(record.exc_info[1])
        return json.dumps(line, ensure_ascii=False)


def _trace(error: BaseException) -> str:
    """The frames of `error`, after those of what it came from, each part with its type as the last line."""
    parts: list[str] = []
    link: BaseException | None = error
    while link is not None and len(parts) < MAX_CAUSES:
        parts.append("".join(traceback.format_tb(link.__traceback__)) + type(link).__name__)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return "\n".join(reversed(parts))


def configure_logs(level: int = logging.INFO) -> None:
    """Sends our packages' logs to stderr as JSON; other libraries' loggers are left alone. Safe to repeat."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    for name in ("headrace", "router", "workers"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(level)
        logger.propagate = False
