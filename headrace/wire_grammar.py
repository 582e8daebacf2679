"""Grammars as messages of `headrace.v1`."""

from __future__ import annotations

import json
from collections.abc import Mapping

from headrace.errors import InvalidRequest
from headrace.grammar import choices_of
from headrace.sampling import Grammar, GrammarKind
from headrace.v1 import inference_pb2 as pb


def grammar_from_proto(message: pb.Grammar) -> Grammar:
    """Raises InvalidRequest where none of its kinds is set."""
    kind = message.WhichOneof("kind")
    if kind is None:
        raise InvalidRequest("grammar says nothing: set json_schema, regex, ebnf or choice", field="grammar")
    if kind == "choice":
        return Grammar(GrammarKind.CHOICE, json.dumps(list(message.choice.texts), ensure_ascii=False))
    return Grammar(GrammarKind(kind), getattr(message, kind))


def grammar_to_proto(value: object) -> pb.Grammar:
    """From a `Grammar`, or a mapping of one kind to what it is: `{"json_schema": {…}}`, `{"choice": ["yes", "no"]}`.

    Raises InvalidRequest for anything else.
    """
    if isinstance(value, Grammar):
        kind, content = value.kind.value, value.text
    elif isinstance(value, Mapping) and len(value) == 1 and next(iter(value)) in set(GrammarKind):
        kind, content = next(iter(value.items()))
    else:
        raise InvalidRequest(f"grammar must be a mapping of one of {', '.join(GrammarKind)}", field="grammar")
    try:
        if kind == GrammarKind.CHOICE:
            texts = choices_of(content) if isinstance(content, str) else content
            return pb.Grammar(choice=pb.Choices(texts=texts))
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        message = pb.Grammar()
        setattr(message, kind, text)
        return message
    except (TypeError, ValueError) as fault:
        raise InvalidRequest(f"grammar.{kind} cannot be {content!r:.80}", field=f"grammar.{kind}") from fault
