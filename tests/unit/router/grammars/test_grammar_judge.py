"""A grammar is judged before its request is accepted, in a process whose end harms nobody."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from headrace.errors import InvalidRequest, Overloaded, Unavailable
from headrace.sampling import Grammar, GrammarKind
from router.grammars.judge import MAX_UNJUDGED, GrammarJudge

LIMIT_S = 1.0
EXPLODING = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "integer", "multipleOf": 99999989}')
"""The library works on it for minutes."""
GOOD = Grammar(GrammarKind.REGEX, "a+")


@pytest_asyncio.fixture
async def judge(model_folder: Path) -> AsyncIterator[GrammarJudge]:
    judge = GrammarJudge(str(model_folder), LIMIT_S)
    await asyncio.gather(judge.warm(), judge.warm())  # at once, so both children
    yield judge
    judge.close()


async def test_verdicts_name_the_field_and_the_reason(judge: GrammarJudge) -> None:
    await judge.check(GOOD, "guided_regex")
    await judge.check(Grammar(GrammarKind.CHOICE, '["a", "\\ud83d\\ude00\\"\\\\"]'), "guided_choice")
    with pytest.raises(InvalidRequest, match="strnig") as refusal:
        await judge.check(Grammar(GrammarKind.JSON_SCHEMA, '{"type": "strnig"}'), "response_format.json_schema.schema")
    assert refusal.value.field == "response_format.json_schema.schema"


async def test_an_exploding_grammar_is_refused_in_time_and_harms_nobody(judge: GrammarJudge) -> None:
    longest_gap_s = 0.0

    async def feel_the_loop() -> None:
        nonlocal longest_gap_s
        while True:
            before_s = time.perf_counter()
            await asyncio.sleep(0.001)
            longest_gap_s = max(longest_gap_s, time.perf_counter() - before_s)

    feeling = asyncio.create_task(feel_the_loop())
    exploding = asyncio.create_task(judge.check(EXPLODING, "guided_json"))
    begun_s = time.perf_counter()
    await judge.check(Grammar(GrammarKind.REGEX, "beside it"), "guided_regex")
    assert not exploding.done()
    with pytest.raises(InvalidRequest, match=r"too complex: not compiled within 1 s"):
        await exploding
    assert time.perf_counter() - begun_s < LIMIT_S + 4.0
    feeling.cancel()
    assert longest_gap_s < LIMIT_S / 2
    await judge.check(Grammar(GrammarKind.REGEX, "after it"), "guided_regex")


async def test_a_verdict_is_kept_and_shared_by_those_who_ask_at_once(judge: GrammarJudge) -> None:
    asking = [asyncio.create_task(judge.check(EXPLODING, "guided_json")) for _ in range(3 * MAX_UNJUDGED)]
    asking[0].cancel()
    outcomes = await asyncio.gather(*asking, return_exceptions=True)
    assert isinstance(outcomes[0], asyncio.CancelledError)
    assert {str(outcome) for outcome in outcomes[1:]} == {"guided_json: too complex: not compiled within 1 s"}
    begun_s = time.perf_counter()
    with pytest.raises(InvalidRequest):
        await judge.check(EXPLODING, "guided_json")
    assert time.perf_counter() - begun_s < LIMIT_S / 2


async def test_too_many_new_grammars_at_once_are_told_to_come_back(judge: GrammarJudge) -> None:
    asked = [
        asyncio.create_task(judge.check(Grammar(GrammarKind.REGEX, f"a{{{i}}}"), "grammar"))
        for i in range(MAX_UNJUDGED + 5)
    ]
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    assert outcomes[:MAX_UNJUDGED] == [None] * MAX_UNJUDGED
    assert all(isinstance(outcome, Overloaded) and outcome.retry_after_s for outcome in outcomes[MAX_UNJUDGED:])
    await judge.check(GOOD, "grammar")


def stand_in(folder: Path, body: str) -> tuple[str, ...]:
    """A child that says ready and then does `body` for each line it is told."""
    script = folder / "child.py"
    script.write_text(f"import os, sys\nprint('\"ready\"', flush=True)\nfor line in sys.stdin:\n    {body}\n")
    return (sys.executable, str(script))


async def test_a_grammar_that_ends_its_child_is_refused_and_the_next_child_serves(tmp_path: Path) -> None:
    body = """os.abort() if 'poison' in line else print('""', flush=True)"""
    judge = GrammarJudge("", LIMIT_S, stand_in(tmp_path, body))
    try:
        for _ in range(3):
            with pytest.raises(InvalidRequest, match="ended the process"):
                await judge.check(Grammar(GrammarKind.REGEX, "poison"), "grammar")
        await judge.check(GOOD, "grammar")
    finally:
        judge.close()


async def test_without_a_child_nothing_is_accepted_unseen() -> None:
    judge = GrammarJudge("", LIMIT_S, (sys.executable, "-c", "raise SystemExit(3)"))
    await judge.warm()
    with pytest.raises(Unavailable):
        await judge.check(GOOD, "grammar")
    judge.close()


async def test_closing_ends_a_child_at_work(tmp_path: Path) -> None:
    told = tmp_path / "told"
    os.mkfifo(told)
    body = f"open({str(told)!r}, 'w').write(str(os.getpid())); sys.stdin.read()"
    judge = GrammarJudge("", 60.0, stand_in(tmp_path, body))
    asking = asyncio.create_task(judge.check(GOOD, "grammar"))
    pid = int(await asyncio.to_thread(told.read_text))
    judge.close()
    with pytest.raises((InvalidRequest, Unavailable)):
        await asking
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
