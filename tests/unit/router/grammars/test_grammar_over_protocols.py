"""Structured output as clients ask for it: every way leads to the same grammar, and what is wrong is named before
anything is queued.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import grpc
import pytest

from headrace.sampling import Grammar, GrammarKind
from headrace.store.interface import Admit, Admitted, Refused
from headrace.v1 import inference_pb2 as pb

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Give 4 names as JSON"}]
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["😀", 'é"x']}}}
JSON = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA, ensure_ascii=False))
OBJECT = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}')
EXPLODING = {"type": "integer", "multipleOf": 99999989}

ASKED: list[tuple[dict[str, Any], Grammar | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None, "guided_json": None, "structured_outputs": {}}, None),
    ({"response_format": {"type": "json_object"}}, OBJECT),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "r", "strict": True, "schema": SCHEMA}}},
        JSON,
    ),
    ({"guided_json": SCHEMA}, JSON),
    ({"guided_json": JSON.text}, JSON),
    ({"guided_regex": "a|b"}, Grammar(GrammarKind.REGEX, "a|b")),
    ({"guided_choice": ["ja", '"né"']}, Grammar(GrammarKind.CHOICE, '["ja", "\\"né\\""]')),
    ({"guided_grammar": 'root ::= "a"+'}, Grammar(GrammarKind.EBNF, 'root ::= "a"+')),
    ({"structured_outputs": {"json": SCHEMA, "regex": None}}, JSON),
    ({"structured_outputs": {"json_object": True}}, OBJECT),
    ({"structured_outputs": {"choice": ["a"], "json_object": False}}, Grammar(GrammarKind.CHOICE, '["a"]')),
]

PLACE = "response_format.json_schema"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "banana"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema", "schema": {"type": "object"}}}, "response_format.schema"),
    ({"response_format": {"type": "json_schema"}}, PLACE),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, f"{PLACE}.name"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "r"}}}, f"{PLACE}.schema"),
    ({"response_format": {"type": "json_object", "json_schema": {}}}, "response_format.json_schema"),
    ({"guided_json": 3}, "guided_json"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": {"not": {}}}, "guided_json"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"guided_regex": "x" * 70_000}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": ["a", 1]}, "guided_choice"),
    ({"guided_grammar": "start: nothing"}, "guided_grammar"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"lark": "a"}}, "structured_outputs.lark"),
    ({"structured_outputs": {"regex": "["}}, "structured_outputs.regex"),
]
BAD_SCHEMAS: list[dict[str, Any]] = [
    {"type": "strnig"},
    {"$ref": "#/$defs/missing"},
    {"type": "string", "pattern": "("},
    {"type": "string", "pattern": "\ud800"},
]


async def test_every_way_to_ask_leads_to_the_same_grammar(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    admit, admitted = rig.store.admit, []

    async def noting(call: Admit) -> Admitted | Refused:
        admitted.append(call.request.sampling.grammar)
        return await admit(call)

    monkeypatch.setattr(rig.store, "admit", noting)
    for body, grammar in ASKED:
        response = await rig.post(CHAT, messages=HI, max_tokens=1, **body)
        assert response.status_code == 200, (body, response.text)
        assert admitted.pop() == grammar
    sampling = pb.SamplingParams(max_tokens=1, grammar=pb.Grammar(choice=pb.Choices(texts=["ja", '"né"'])))
    async for _ in rig.stub.Generate(pb.GenerateRequest(text="x", sampling=sampling)):
        pass
    assert admitted == [ASKED[7][1]]


async def test_what_is_wrong_is_named_and_nothing_is_queued(rig: Any) -> None:
    await rig.service.warm()
    for schema in BAD_SCHEMAS:
        asked = {"response_format": {"type": "json_schema", "json_schema": {"name": "r", "schema": schema}}}
        begun_s = time.perf_counter()
        response = await rig.http.post(CHAT, content=json.dumps({"model": "reciter", "messages": HI, **asked}))
        assert response.status_code == 400, response.text
        assert time.perf_counter() - begun_s < 2
    for body, field in REFUSED:
        response = await rig.post(CHAT, messages=HI, max_tokens=64, **body)
        assert response.status_code == 400, (body, response.text)
        error = response.json()["error"]
        assert error["param"] == field, error
        assert error["message"].strip()
    for message, field in (
        (pb.Grammar(regex="("), "grammar.regex"),
        (pb.Grammar(json_schema='{"type": "strnig"}'), "grammar.json_schema"),
        (pb.Grammar(), "grammar"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await anext(
                aiter(rig.stub.Generate(pb.GenerateRequest(text="x", sampling=pb.SamplingParams(grammar=message))))
            )
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert dict(refused.value.trailing_metadata() or ())["headrace-field"] == field
    assert rig.reciter.seen == []
    response = await rig.post(COMPLETIONS, prompt="Hello", max_tokens=4, temperature=0)
    assert response.json()["choices"][0]["text"] == "Hell"


async def test_while_a_grammar_explodes_others_are_answered(rig: Any) -> None:
    exploding = asyncio.create_task(rig.post(CHAT, messages=HI, guided_json=EXPLODING))
    for _ in range(5):
        response = await rig.post(COMPLETIONS, prompt="Hello", max_tokens=4)
        assert response.status_code == 200
    assert not exploding.done()
    answer = await exploding
    assert answer.status_code == 400
    assert "too complex: not compiled within 2 s" in answer.json()["error"]["message"]
