"""Whatever a model prefers, what comes out under a schema is an instance of it, as an independent validator says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.frame import FinishReason
from headrace.grammar import GrammarCompiler, GrammarFault
from headrace.request import Request
from headrace.sampling import Grammar, GrammarKind, SamplingParams
from headrace.tokenizer import Tokenizer
from tests.fixtures.random_logits_runner import RandomLogitsRunner
from tests.fixtures.schemas import SCHEMAS
from tests.fixtures.scripted_runner import Client, Ticks, bind, make_config
from workers.engine import Engine


@pytest.fixture(scope="module")
def tokenizer(model_path: Path) -> Tokenizer:
    return Tokenizer.load(model_path)


@pytest.fixture(scope="module")
def engine(tokenizer: Tokenizer) -> Engine:
    return Engine(RandomLogitsRunner(tokenizer), make_config(block_size=16), tokenizer, Ticks())


def written(engine: Engine, tokenizer: Tokenizer, schemas: list[dict[str, Any]], **params: Any) -> list[str | None]:
    """What noise writes under each schema; None where it was cut at `max_tokens`."""
    client, requests = Client(), []
    for i, schema in enumerate(schemas):
        grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False))
        requests.append(Request(f"s{i}", "m", (50, 51, 52), SamplingParams(grammar=grammar, **params)))
        engine.add(bind(requests[-1]))
    while len(client.finishes) < len(requests):
        frame = engine.step()
        client.take(frame)
        if frame is None:
            assert engine._mailbox.wait_for_command(20)
    texts: list[str | None] = []
    for request in requests:
        tokens, finish = client.answer(request.id)
        assert finish in (FinishReason.STOP, FinishReason.LENGTH), client.details[(request.id, 0)]
        text = b"".join(tokenizer.token_bytes(i) for i in tokens if not tokenizer.is_special(i))
        texts.append(text.decode() if finish is FinishReason.STOP else None)
    return texts


def check_instances(schemas: list[dict[str, Any]], texts: list[str | None]) -> int:
    """Returns how many were written to their end."""
    for schema, text in zip(schemas, texts, strict=True):
        if text is not None:
            jsonschema.Draft202012Validator(
                schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
            ).validate(json.loads(text))
    return sum(text is not None for text in texts)


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(-(2**63), 2**63 - 1), temperature=st.sampled_from((0.0, 0.7, 1.5)))
def test_noise_writes_valid_instances(engine: Engine, tokenizer: Tokenizer, seed: int, temperature: float) -> None:
    schemas = list(SCHEMAS)
    texts = written(engine, tokenizer, schemas, max_tokens=60, seed=seed, temperature=temperature)
    # Those without a bound on their length may be cut; the others are not.
    assert check_instances(schemas, texts) >= len(schemas) // 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_noise_writes_valid_instances_of_real_schemas(
    engine: Engine, tokenizer: Tokenizer, pytestconfig: pytest.Config
) -> None:
    path: Path | None = pytestconfig.getoption("--data")
    if path is None:
        pytest.skip("no file of real schemas was given by --data PATH")
    compiler = GrammarCompiler(tokenizer)
    rows = [json.loads(line)["schema"] for line in path.read_text(encoding="utf-8").splitlines()]
    schemas, refused = [], 0
    for schema in rows:
        try:
            compiler.compile(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False)))
            schemas.append(schema)
        except GrammarFault:
            refused += 1
    assert len(schemas) >= 0.85 * len(rows)
    finished = 0
    for first in range(0, len(schemas), 16):
        batch = schemas[first : first + 16]
        finished += check_instances(
            batch, written(engine, tokenizer, batch, max_tokens=300, seed=first, temperature=0.0)
        )
    print(f"{len(rows)} schemas, {refused} refused, {finished} of {len(schemas)} written to their end, all valid")
    assert finished >= len(schemas) // 2
