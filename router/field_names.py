"""Which names of fields may stand in a log: our own. One that a client made up may hold anything, also its prompt."""

from __future__ import annotations

import re
from dataclasses import fields

from headrace.sampling import SamplingParams
from router.ingress.openai_schema import UNSUPPORTED, ChatBody, CompletionBody, StreamOptions

OTHER = "other"
_STEP = re.compile(r"([a-z_-]{1,40})(\[\d{1,7}\])?")
_MOST_STEPS = 4
_KNOWN = frozenset(
    {
        *(field.name for field in fields(SamplingParams)),
        *CompletionBody.model_fields,
        *ChatBody.model_fields,
        *StreamOptions.model_fields,
        *UNSUPPORTED,
        *("role", "content", "type", "text", "token_ids", "ids", "request_id", "x-request-id"),
    }
)


def loggable(field: str | None) -> str | None:
    """`messages[3].content` as it is; `OTHER` unless each step of the path is a name of ours."""
    if field is None:
        return None
    steps = [_STEP.fullmatch(step) for step in field.split(".", _MOST_STEPS)]
    return field if all(step is not None and step[1] in _KNOWN for step in steps) else OTHER
