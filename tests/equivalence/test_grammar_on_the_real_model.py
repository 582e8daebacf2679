"""The real model under grammars: what it writes is in the language, and a grammar moves no other request's tokens."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from headrace.frame import FinishReason
from headrace.request import Request
from headrace.sampling import Grammar, GrammarKind, SamplingParams
from headrace.tokenizer import Tokenizer
from tests.fixtures.scripted_runner import Client, bind
from workers.config import EngineConfig
from workers.engine import Engine

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colour": {"enum": ["réd", 'b"lue', "😀"]},
    },
    "required": ["name", "age", "colour"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(model_path: Path) -> Tokenizer:
    return Tokenizer.load(model_path)


@pytest.fixture(scope="module")
def engine(model_path: Path, tokenizer: Tokenizer) -> Engine:
    from workers.model.loader import load_runner

    config = EngineConfig(model_path=str(model_path), model_name="m", dtype="float32", num_blocks=96, max_context=512)
    return Engine(load_runner(config), config, tokenizer)


def answers(engine: Engine, *requests: Request) -> Client:
    client = Client()
    for request in requests:
        engine.add(bind(request))
    while len(client.finishes) < sum(request.n for request in requests):
        frame = engine.step()
        client.take(frame)
        if frame is None:
            assert engine._mailbox.wait_for_command(20)
    return client


def test_answers_are_in_the_language_and_neighbours_are_not_moved(engine: Engine, tokenizer: Tokenizer) -> None:
    prompt = tuple(tokenizer.encode("A person as JSON:\n", add_special=False))

    def ask(name: str, grammar: Grammar | None, temperature: float, max_tokens: int = 60) -> Request:
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=5, grammar=grammar)
        return Request(name, "m", prompt, params)

    schema = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(PERSON))
    free = ask("free", None, 0.0, 12)
    alone = answers(engine, free).tokens[("free", 0)]
    client = answers(
        engine,
        free,
        ask("greedy", schema, 0.0),
        ask("drawn", schema, 1.0),
        ask("choice", Grammar(GrammarKind.CHOICE, '["maybe", "no", "yes"]'), 1.0, 10),
    )
    assert client.tokens[("free", 0)] == alone

    def text(name: str, choice: int = 0) -> str:
        shown = (i for i in client.tokens[(name, choice)] if not tokenizer.is_special(i))
        return b"".join(map(tokenizer.token_bytes, shown)).decode()

    for key in (("greedy", 0), ("drawn", 0)):
        assert client.finishes[key] is FinishReason.STOP
        jsonschema.validate(json.loads(text(*key)), PERSON)
    assert text("choice") in ("maybe", "no", "yes")
