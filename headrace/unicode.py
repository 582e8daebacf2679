"""The one check that text from a client is text: Python strings may hold lone surrogates, UTF-8 may not."""

from __future__ import annotations

from headrace.errors import InvalidRequest


def require_unicode(text: str, field: str) -> None:
    """Raises InvalidRequest naming `field` where `text` has no UTF-8 form (JSON's "\\ud800" makes such strings)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as fault:
        message = f"{field} is not valid Unicode: lone surrogate at character {fault.start}"
        raise InvalidRequest(message, field=field) from None
