"""Structured logs: one JSON object a line, with the request id where there is one, and never a prompt or its answer.

Nothing in router or worker hands text or token ids to a logger; `extra` fields are ids, counts and durations.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

_STANDARD = frozenset(vars(logging.makeLogRecord({})))
MAX_VALUE_CHARS = 200


class JsonFormatter(logging.Formatter):
    """`{"time", "level", "logger", "message", …extra}`; an exception comes as `error`, its traceback as `trace`."""

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
            line["error"] = repr(record.exc_info[1])[:MAX_VALUE_CHARS]
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure_logs(level: int = logging.INFO) -> None:
    """Sends our packages' logs to stderr as JSON; other libraries' loggers are left alone. Safe to repeat."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    for name in ("headrace", "router", "workers"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(level)
        logger.propagate = False
