"""What a library says of the text it was given does not reach a log line; where it failed does."""

from __future__ import annotations

import json
import logging

from headrace.logs import JsonFormatter

SECRET = "my diagnosis is"


def _parse(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise RuntimeError(f"cannot take {text!r}") from error


def test_of_an_exception_only_types_and_places_are_logged() -> None:
    try:
        _parse(SECRET)
    except RuntimeError as error:
        record = logging.makeLogRecord({"msg": "a call failed", "exc_info": (type(error), error, error.__traceback__)})
    line = JsonFormatter().format(record)
    assert SECRET not in line
    told = json.loads(line)
    assert told["error"] == "RuntimeError"
    assert "in _parse" in told["trace"]
    assert told["trace"].endswith("\nRuntimeError")
    assert "\nValueError\n" in told["trace"], "the cause comes first"
