"""Request ids sort by time and never clash; log lines are JSON."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from headrace.errors import InvalidRequest
from headrace.logs import MAX_VALUE_CHARS, JsonFormatter
from router.field_names import OTHER, loggable
from router.ingress.asgi_exchange import checked_request_id
from router.request_id import mint_request_id


def test_ids_carry_the_tag_sort_by_time_and_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = 1_790_000_000_000_000_000
    monkeypatch.setattr("router.request_id.time.time_ns", lambda: now_ns)
    early = [mint_request_id("ab12") for _ in range(500)]
    now_ns += 1_000_000
    late = [mint_request_id("ab12") for _ in range(500)]
    assert len(set(early + late)) == 1000
    assert max(early) < min(late)
    assert all(name.startswith("ab12-") and len(name) == 31 for name in early)


@pytest.mark.parametrize("name", [b"a", b"trace 7/x", b"~" * 128])
def test_a_clients_own_id_of_printable_ascii_is_taken(name: bytes) -> None:
    assert checked_request_id(name) == name.decode()


@pytest.mark.parametrize("name", [b"", b"x" * 129, b"a\tb", b"a\r\nb", "ü".encode(), b"\x00", b"x" * 1_000_000])
def test_any_other_is_refused_without_repeating_it(name: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        checked_request_id(name)
    assert caught.value.field == "x-request-id"
    assert len(caught.value.message) < 200


def test_log_lines_are_json_with_bounded_fields() -> None:
    record = logging.makeLogRecord({"name": "router", "levelname": "INFO", "msg": "accepted %s", "args": ("x",)})
    record.request_id, record.prompt_tokens, record.long = "t-1", 5, "y" * 10_000
    line = json.loads(JsonFormatter().format(record))
    assert line["message"] == "accepted x"
    assert (line["level"], line["request_id"], line["prompt_tokens"]) == ("info", "t-1", 5)
    assert len(line["long"]) == MAX_VALUE_CHARS


def test_a_logged_fault_keeps_its_trace_in_one_line() -> None:
    try:
        raise ValueError("broken")
    except ValueError as error:
        record = logging.makeLogRecord({"msg": "failed", "exc_info": (ValueError, error, error.__traceback__)})
    text = JsonFormatter().format(record)
    assert "\n" not in text
    assert json.loads(text)["error"] == "ValueError"


@pytest.mark.parametrize(
    "field",
    [None, "prompt", "messages[3].content[0].type", "stop[1]", "stream_options.include_usage", "tools", "x-request-id"],
)
def test_the_names_of_our_own_fields_may_be_logged(field: str | None) -> None:
    assert loggable(field) == field


@pytest.mark.parametrize(
    "field",
    ["", "my_diagnosis", "stream_options.my_diagnosis", "prompt.", "prompt[x]", "prompt\nx", "stop[1" + "0" * 99],
)
def test_a_name_that_a_client_made_up_may_not(field: str) -> None:
    assert loggable(field) == OTHER


async def test_a_refusal_is_logged_without_what_the_client_wrote(rig: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for body in ({"my diagnosis": 1}, {"stream": True, "stream_options": {"my diagnosis": 1}}, {"max_tokens": 0}):
        reply = await rig.post("/v1/completions", **{"prompt": "my diagnosis is", **body})
        assert reply.status_code == 400
    refusals = [record for record in caplog.records if record.getMessage() == "refused: InvalidRequest"]
    assert [vars(record)["field"] for record in refusals] == ["other", "other", "max_tokens"]
    assert not any("diagnosis" in JsonFormatter().format(record) for record in caplog.records)
