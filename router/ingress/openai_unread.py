"""Which field it was, where the strict parser could not take a body as JSON although it nearly is."""

from __future__ import annotations

import json

from headrace.errors import InvalidRequest
from headrace.unicode import require_unicode

MAX_NESTING = 200
"""Of the parser (jiter): lists and objects inside each other in a field."""


def refusal_of_unread(raw: bytes) -> InvalidRequest:
    """Names the field that holds half a surrogate pair or nests too deep, as Python's tolerant parser finds it."""
    try:
        body = json.loads(raw)
        for name, value in body.items() if isinstance(body, dict) else ():
            name.encode()  # where not even this can be told, no field is
            require_unicode(json.dumps(value, ensure_ascii=False), name[:64])
            if _depth(value) > MAX_NESTING:
                return InvalidRequest(f"{name[:64]} nests too deep: the limit is {MAX_NESTING}", field=name[:64])
    except InvalidRequest as fault:
        # The place was counted in the value's JSON and would only mislead.
        return InvalidRequest(f"{fault.field} is not valid Unicode: lone surrogate", field=fault.field)
    except (ValueError, RecursionError):
        pass
    return InvalidRequest("the body is not valid JSON in UTF-8")


def _depth(value: object) -> int:
    """0 for a number, 1 for `[]`, 2 for `[[]]`."""
    depth, layer = 0, [value]
    while nests := [item for item in layer if isinstance(item, list | dict)]:
        depth += 1
        layer = [inner for nest in nests for inner in (nest.values() if isinstance(nest, dict) else nest)]
    return depth
