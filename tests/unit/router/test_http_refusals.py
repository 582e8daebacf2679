"""Bad input over HTTP: a 4xx in OpenAI's shape that names the field, before any stream, and nobody else is harmed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

MODEL = "reciter"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


def _assert_refused(response: Any, status: int | tuple[int, ...], param: str | None = None) -> None:
    allowed = (status,) if isinstance(status, int) else status
    assert response.status_code in allowed, (response.status_code, response.text[:300])
    assert len(response.content) < 4096
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in response.text
    assert error["param"] == param, error


async def _assert_alive(rig: Any) -> None:
    response = await rig.post(COMPLETIONS, prompt="Hello", max_tokens=4, temperature=0)
    assert response.json()["choices"][0]["text"] == "Hell"
    await rig.idle()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_bodies_that_are_no_json_object(rig: Any, path: str) -> None:
    seen_before = len(rig.reciter.seen)
    nested = b"[" * 100_000
    bodies = [b"[]", b'"x"', b"123", b"null", b"true", b"{", b'{"model":', b"", b"  ", b"\xff\xfe\x00", nested]
    bodies += [b'{"model":"' + b"x" * 10 + b'\xff"}', b'{"\\ud800":1}', b'{"a":"\\ud800', b"\xef\xbb\xbf{}"]
    for body in bodies:
        _assert_refused(await rig.http.post(path, content=body), 400)
    assert len(rig.reciter.seen) == seen_before
    await _assert_alive(rig)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "value", ['"a\\ud800"', '{"b":["\\udfff"]}', "[" * 201 + "]" * 201, '{"a":' * 250 + "1" + "}" * 250]
)
async def test_a_field_that_the_parser_cannot_read_is_named(rig: Any, path: str, value: str) -> None:
    body = f'{{"model":"{MODEL}","stop":"x","extra":{value}}}'
    _assert_refused(await rig.http.post(path, content=body.encode()), 400, "extra")
    await _assert_alive(rig)


BAD_FIELDS: list[tuple[str, dict[str, object], int, str]] = [
    (CHAT, {"messages": HI}, 400, "model"),
    (CHAT, {"model": "", "messages": HI}, 400, "model"),
    (CHAT, {"model": 3, "messages": HI}, 400, "model"),
    (CHAT, {"model": "nope", "messages": HI}, 404, "model"),
    (COMPLETIONS, {"model": "nope", "prompt": "hi"}, 404, "model"),
    (CHAT, {"model": MODEL}, 400, "messages"),
    (CHAT, {"model": MODEL, "messages": "hi"}, 400, "messages"),
    (CHAT, {"model": MODEL, "messages": [1, 2, 3]}, 400, "messages[0]"),
    (CHAT, {"model": MODEL, "messages": [{"role": 1, "content": {"x": 1}}] * 4000}, 400, "messages[0].role"),
    (CHAT, {"model": MODEL, "messages": [*HI, {"role": 1, "content": "x"}] * 3000}, 400, "messages"),
    (COMPLETIONS, {"model": MODEL}, 400, "prompt"),
    (COMPLETIONS, {"model": MODEL, "prompt": None}, 400, "prompt"),
    (COMPLETIONS, {"model": MODEL, "prompt": {"a": 1}}, 400, "prompt"),
    (COMPLETIONS, {"model": MODEL, "prompt": 7}, 400, "prompt"),
    (COMPLETIONS, {"model": MODEL, "prompt": ""}, 400, "prompt"),
    (COMPLETIONS, {"model": MODEL, "prompt": []}, 400, "prompt"),
    (COMPLETIONS, {"model": MODEL, "prompt": ["a", "b"]}, 400, "prompt"),
    (COMPLETIONS, {"model": MODEL, "prompt": [1, 2, 300]}, 400, "prompt[2]"),
    (COMPLETIONS, {"model": MODEL, "prompt": [1, -1]}, 400, "prompt[1]"),
    (COMPLETIONS, {"model": MODEL, "prompt": [1, 2.5]}, 400, "prompt[1]"),
    (COMPLETIONS, {"model": MODEL, "prompt": [1, True]}, 400, "prompt[1]"),
    (COMPLETIONS, {"model": MODEL, "prompt": [10**4000]}, 400, "prompt[0]"),
    (COMPLETIONS, {"model": MODEL, "prompt": "hi", "max_tokens": 0}, 400, "max_tokens"),
    (COMPLETIONS, {"model": MODEL, "prompt": "hi", "max_tokens": "4"}, 400, "max_tokens"),
    (COMPLETIONS, {"model": MODEL, "prompt": "hi", "max_tokens": True}, 400, "max_tokens"),
    (COMPLETIONS, {"model": MODEL, "prompt": "hi", "temperature": "hot"}, 400, "temperature"),
    (COMPLETIONS, {"model": MODEL, "prompt": "hi", "temperature": -0.1}, 400, "temperature"),
    (COMPLETIONS, {"model": MODEL, "prompt": "hi", "top_p": 0}, 400, "top_p"),
    (COMPLETIONS, {"model": MODEL, "prompt": "hi", "top_p": 1.1}, 400, "top_p"),
    (COMPLETIONS, {"model": MODEL, "prompt": "hi", "top_k": -2}, 400, "top_k"),
    (COMPLETIONS, {"model": MODEL, "prompt": "hi", "seed": 2**63}, 400, "seed"),
    (COMPLETIONS, {"model": MODEL, "prompt": "hi", "stop": ["a", 1]}, 400, "stop[1]"),
    (COMPLETIONS, {"model": MODEL, "prompt": "hi", "stop": [""]}, 400, "stop[0]"),
    (COMPLETIONS, {"model": MODEL, "prompt": "hi", "stop": ["x"] * 17}, 400, "stop"),
    (COMPLETIONS, {"model": MODEL, "prompt": "hi", "stop": {"a": 1}}, 400, "stop"),
    (COMPLETIONS, {"model": MODEL, "prompt": "hi", "stop_token_ids": [300]}, 400, "stop_token_ids[0]"),
    (COMPLETIONS, {"model": MODEL, "prompt": "hi", "stop_token_ids": [10**4000]}, 400, "stop_token_ids[0]"),
    (COMPLETIONS, {"model": MODEL, "prompt": "hi", "min_tokens": 9, "max_tokens": 8}, 400, "min_tokens"),
    (COMPLETIONS, {"model": MODEL, "prompt": "hi", "ignore_eos": "yes"}, 400, "ignore_eos"),
    (COMPLETIONS, {"model": MODEL, "prompt": "hi", "stream_options": 1}, 400, "stream_options"),
    (COMPLETIONS, {"model": MODEL, "prompt": "hi", "n": 0}, 400, "n"),
    (COMPLETIONS, {"model": MODEL, "prompt": "hi", "n": 129}, 400, "n"),
    (COMPLETIONS, {"model": MODEL, "prompt": "hi", "n": True}, 400, "n"),
    (COMPLETIONS, {"model": MODEL, "prompt": "hi", "n": 2.0}, 400, "n"),
    (COMPLETIONS, {"model": MODEL, "prompt": "hi", "n": 3, "best_of": 2}, 400, "best_of"),
    (COMPLETIONS, {"model": MODEL, "prompt": "hi", "best_of": 0}, 400, "best_of"),
    (COMPLETIONS, {"model": MODEL, "prompt": "hi", "best_of": 10**9}, 400, "best_of"),
    (CHAT, {"model": MODEL, "messages": HI, "best_of": 2}, 400, "best_of"),
    (COMPLETIONS, {"model": MODEL, "prompt": "hi", "priority": -1}, 400, "priority"),
    (COMPLETIONS, {"model": MODEL, "prompt": "hi", "priority": 8}, 400, "priority"),
    (COMPLETIONS, {"model": MODEL, "prompt": "hi", "priority": "high"}, 400, "priority"),
    (COMPLETIONS, {"model": MODEL, "prompt": "hi", "n": 11, "max_tokens": 400}, 400, "max_tokens"),
    (COMPLETIONS, {"model": MODEL, "prompt": "hi", "min_p": -0.1}, 400, "min_p"),
    (COMPLETIONS, {"model": MODEL, "prompt": "hi", "min_p": 1.1}, 400, "min_p"),
    (COMPLETIONS, {"model": MODEL, "prompt": "hi", "min_p": "a"}, 400, "min_p"),
    (COMPLETIONS, {"model": MODEL, "prompt": "hi", "presence_penalty": 2.1}, 400, "presence_penalty"),
    (COMPLETIONS, {"model": MODEL, "prompt": "hi", "frequency_penalty": -2.1}, 400, "frequency_penalty"),
    (COMPLETIONS, {"model": MODEL, "prompt": "hi", "repetition_penalty": 0}, 400, "repetition_penalty"),
    (COMPLETIONS, {"model": MODEL, "prompt": "hi", "repetition_penalty": 10.5}, 400, "repetition_penalty"),
    (COMPLETIONS, {"model": MODEL, "prompt": "hi", "logit_bias": [1]}, 400, "logit_bias"),
    (COMPLETIONS, {"model": MODEL, "prompt": "hi", "logit_bias": {"a": 1}}, 400, "logit_bias"),
    (COMPLETIONS, {"model": MODEL, "prompt": "hi", "logit_bias": {"5": 1, "05": 2}}, 400, "logit_bias"),
    (COMPLETIONS, {"model": MODEL, "prompt": "hi", "logit_bias": {"-1": 1}}, 400, "logit_bias"),
    (COMPLETIONS, {"model": MODEL, "prompt": "hi", "logit_bias": {"5": 101}}, 400, "logit_bias"),
    (COMPLETIONS, {"model": MODEL, "prompt": "hi", "logit_bias": {"5": "1"}}, 400, "logit_bias"),
    (COMPLETIONS, {"model": MODEL, "prompt": "hi", "logit_bias": {"9" * 4000: 1}}, 400, "logit_bias"),
    (COMPLETIONS, {"model": MODEL, "prompt": "hi", "logit_bias": {str(i): 1 for i in range(1025)}}, 400,
     "logit_bias"),
    (COMPLETIONS, {"model": MODEL, "prompt": "hi", "no_such_option": 1}, 400, "no_such_option"),
    (CHAT, {"model": MODEL, "messages": HI, "max_tokens": 3, "max_completion_tokens": 4}, 400,
     "max_completion_tokens"),
    (CHAT, {"model": MODEL, "messages": HI, "max_completion_tokens": 100_000}, 400, "max_completion_tokens"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
async def test_bad_fields_are_named(rig: Any, stream: bool) -> None:
    for path, body, status, param in BAD_FIELDS:
        response = await rig.http.post(path, content=json.dumps({**body, "stream": stream}))
        _assert_refused(response, status, param)
    assert rig.reciter.seen == []
    await _assert_alive(rig)


async def test_stream_must_be_a_boolean(rig: Any) -> None:
    _assert_refused(await rig.post(COMPLETIONS, prompt="hi", stream="yes please"), 400, "stream")
    _assert_refused(
        await rig.post(COMPLETIONS, prompt="hi", stream_options={"include_usage": True}), 400, "stream_options"
    )


NOT_YET: list[tuple[str, object]] = [
    ("suffix", "x"), ("tools", [{"type": "function"}]), ("tool_choice", "required"),
    ("reasoning_effort", "low"),
]  # fmt: skip


async def test_options_that_would_change_the_answer_are_refused_until_they_exist(rig: Any) -> None:
    for field, value in NOT_YET:
        _assert_refused(await rig.post(COMPLETIONS, prompt="hi", **{field: value}), 400, field)
    assert rig.reciter.seen == []


async def test_options_at_their_off_value_and_harmless_ones_are_taken(rig: Any) -> None:
    off = {
        "n": 1, "best_of": 1, "echo": False, "suffix": None, "logprobs": None, "logit_bias": {}, "presence_penalty": 0,
        "frequency_penalty": 0.0, "tools": [], "response_format": {"type": "text"}, "user": "u", "metadata": {"a": "b"},
        "store": False, "service_tier": "auto", "top_k": -1, "stop": None, "seed": None, "temperature": None,
    }  # fmt: skip
    response = await rig.post(COMPLETIONS, prompt="hi", max_tokens=2, **off)
    assert response.json()["choices"][0]["text"] == "hi"


async def test_an_oversized_body_is_refused_while_it_is_still_being_sent(rig: Any) -> None:
    async def body() -> Any:
        yield b'{"model":"reciter","prompt":"'
        for _ in range(64):
            yield b"x" * (1 << 20)
        yield b'"}'

    _assert_refused(await rig.http.post(COMPLETIONS, content=body()), 413)
    _assert_refused(await rig.http.post(COMPLETIONS, content=b"x" * (9 << 20)), 413)
    await _assert_alive(rig)


async def test_heads_that_are_too_long_or_no_http(rig: Any) -> None:
    for size in (40_000, 64_000, 500_000):
        _assert_refused(await rig.http.get("/v1/models", headers={"x-long": "y" * size}), (400, 431))
        _assert_refused(await rig.http.get("/v1/models", headers={"x-request-id": "y" * size}), (400, 431))
    _assert_refused(await rig.http.get("/" + "z" * 60_000), (400, 431))
    reader, writer = await asyncio.open_connection("127.0.0.1", int(rig.base_url.rsplit(":", 1)[1]))
    writer.write(b"\x16\x03\x01 this is not http\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(), 5)
    assert answer.startswith(b"HTTP/1.1 400")
    assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["message"]
    writer.close()
    await _assert_alive(rig)


async def test_a_body_cut_short_is_nobodys_request(rig: Any) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", int(rig.base_url.rsplit(":", 1)[1]))
    writer.write(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n{"model"')
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    await _assert_alive(rig)
    assert len(rig.reciter.seen) == 1


async def test_a_body_that_never_comes_is_not_waited_for(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.ingress.asgi_exchange.MAX_BODY_S", 0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(rig.base_url.rsplit(":", 1)[1]))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n{")
    assert (await asyncio.wait_for(reader.readline(), 5)).startswith(b"HTTP/1.1 408")
    writer.close()


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/x-www-form-urlencoded"])
async def test_json_is_taken_whatever_its_content_type_says(rig: Any, content_type: str) -> None:
    headers = {"content-type": content_type} if content_type else {}
    body = json.dumps({"model": MODEL, "prompt": "hey", "max_tokens": 3, "temperature": 0})
    response = await rig.http.post(COMPLETIONS, content=body.encode(), headers=headers)
    assert response.json()["choices"][0]["text"] == "hey"


async def test_other_paths_and_methods_have_the_same_shape(rig: Any) -> None:
    _assert_refused(await rig.http.get("/nowhere"), 404)
    _assert_refused(await rig.http.get(COMPLETIONS), 405)
    _assert_refused(await rig.http.get("/v1/models/unknown"), 404)
    assert (await rig.http.get(f"/v1/models/{MODEL}")).json()["id"] == MODEL


async def test_a_request_id_of_the_client_is_checked_and_never_a_key(rig: Any) -> None:
    for bad in ("x" * 129, "a\tb"):
        response = await rig.http.post(COMPLETIONS, json={"model": MODEL, "prompt": "x"}, headers={"x-request-id": bad})
        _assert_refused(response, 400, "x-request-id")

    async def one(k: int) -> None:
        prompt = f"{1000 + k} "
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 24, "temperature": 0}
        response = await rig.http.post(COMPLETIONS, json=body, headers={"x-request-id": "same"})
        assert response.json()["choices"][0]["text"] == (prompt * 9)[:24]
        assert response.headers["x-request-id"] == "same"
        assert response.json()["id"] != "same"

    await asyncio.gather(*(one(k) for k in range(20)))
    assert len(set(rig.reciter.seen)) == 20
