"""The ways in which OpenAI's bodies ask for structured output, all made into one `Grammar`.

`response_format` is OpenAI's; `guided_*` and `structured_outputs` are vLLM's older and newer names for the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from headrace.errors import InvalidRequest
from headrace.sampling import MAX_GRAMMAR_BYTES, Grammar, GrammarKind

GRAMMAR_FIELDS = (
    "response_format",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
)
ANY_OBJECT = '{"type": "object"}'
_KINDS = {
    "json": GrammarKind.JSON_SCHEMA,
    "regex": GrammarKind.REGEX,
    "choice": GrammarKind.CHOICE,
    "grammar": GrammarKind.EBNF,
}
_OF_JSON_SCHEMA = frozenset({"name", "description", "schema", "strict"})

Found = tuple[Grammar, str]
"""A grammar and the name of the place it came from."""


def grammar_of(body: Mapping[str, object]) -> Found | None:
    """From the fields that ask for one, by name; None where none does. Raises InvalidRequest naming the place."""
    asked = [found for name, value in body.items() if value is not None and (found := _from_field(name, value))]
    if len(asked) > 1:
        field = asked[1][1]
        raise InvalidRequest(f"{asked[0][1]} and {field} both say what the output must be; send one", field=field)
    return asked[0] if asked else None


def _from_field(name: str, value: object) -> Found | None:
    if name == "response_format":
        return _of_response_format(value)
    if name == "structured_outputs":
        return _of_structured_outputs(value)
    return _of_kind(_KINDS[name.removeprefix("guided_")], value, name)


def _of_response_format(value: object) -> Found | None:
    field = "response_format"
    if not isinstance(value, dict):
        raise InvalidRequest(f"{field} must be an object", field=field)
    kind = value.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise InvalidRequest(f"{field}.type must be text, json_object or json_schema", field=f"{field}.type")
    _only(value, {"type", "json_schema"} if kind == "json_schema" else {"type"}, field)
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar(GrammarKind.JSON_SCHEMA, ANY_OBJECT), field
    field = f"{field}.json_schema"
    inner = value.get("json_schema")
    if not isinstance(inner, dict):
        raise InvalidRequest(f"{field} must be an object with name and schema", field=field)
    _only(inner, _OF_JSON_SCHEMA, field)
    if not isinstance(inner.get("name"), str):
        raise InvalidRequest(f"{field}.name must be a string", field=f"{field}.name")
    if not isinstance(inner.get("strict"), bool | None):
        raise InvalidRequest(f"{field}.strict must be true or false", field=f"{field}.strict")
    if not isinstance(inner.get("schema"), dict):
        raise InvalidRequest(f"{field}.schema must be an object", field=f"{field}.schema")
    return _of_kind(GrammarKind.JSON_SCHEMA, inner["schema"], f"{field}.schema")


def _of_structured_outputs(value: object) -> Found | None:
    field = "structured_outputs"
    if not isinstance(value, dict):
        raise InvalidRequest(f"{field} must be an object", field=field)
    _only(value, {*_KINDS, "json_object"}, field)
    asked = {
        key: entry for key, entry in value.items() if entry is not None and not (key == "json_object" and not entry)
    }
    if len(asked) > 1:
        raise InvalidRequest(f"{field} must have only one of {', '.join(asked)}", field=field)
    for key, entry in asked.items():
        if key != "json_object":
            return _of_kind(_KINDS[key], entry, f"{field}.{key}")
        if entry is not True:
            raise InvalidRequest(f"{field}.{key} must be true or false", field=f"{field}.{key}")
        return Grammar(GrammarKind.JSON_SCHEMA, ANY_OBJECT), f"{field}.{key}"
    return None


def _of_kind(kind: GrammarKind, value: object, field: str) -> Found:
    """Schemas may also come as their own text, as in vLLM. What the text says is judged later."""
    if kind is GrammarKind.CHOICE:
        if not isinstance(value, list) or not all(isinstance(choice, str) for choice in value):
            raise InvalidRequest(f"{field} must be a list of strings", field=field)
        text = json.dumps(value, ensure_ascii=False)
    elif kind is GrammarKind.JSON_SCHEMA and isinstance(value, dict):
        text = json.dumps(value, ensure_ascii=False)
    elif isinstance(value, str):
        text = value
    else:
        also = " or an object" if kind is GrammarKind.JSON_SCHEMA else ""
        raise InvalidRequest(f"{field} must be a string{also}", field=field)
    if len(text.encode("utf-8", "replace")) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"{field} is longer than {MAX_GRAMMAR_BYTES} bytes", field=field)
    return Grammar(kind, text), field


def _only(value: dict[str, Any], known: set[str] | frozenset[str], field: str) -> None:
    for key in value:
        if key not in known:
            raise InvalidRequest(f"{field} has an unknown field {key[:64]!r}", field=f"{field}.{key[:64]}")
