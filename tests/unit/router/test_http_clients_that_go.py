"""HTTP clients that go away, many that stay, and what Prometheus then says."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from headrace.errors import Moved
from headrace.sampling import SamplingParams
from router.admission.call import Call, TextPrompt


async def _open(rig: Any, body: dict[str, object]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(rig.base_url.rsplit(":", 1)[1]))
    raw = json.dumps({"model": "reciter", **body}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(raw) + raw)
    await writer.drain()
    return reader, writer


async def test_closing_a_stream_cancels(rig: Any) -> None:
    rig.reciter.hold(after=3)
    text = ""
    async with rig.http.stream(
        "POST", "/v1/completions", json={"model": "reciter", "prompt": "x", "max_tokens": 500, "stream": True}
    ) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                request_id = json.loads(line[6:])["id"]
                text += json.loads(line[6:])["choices"][0]["text"]
                if len(text) == 3:
                    break
    await rig.assert_gone_at_once(request_id, received=3)


async def test_going_during_a_call_without_a_stream_cancels(rig: Any) -> None:
    rig.reciter.hold()
    _, writer = await _open(rig, {"prompt": "x", "max_tokens": 500})
    await rig.until(lambda: rig.service._delivery.open_streams == 1)
    await rig.until(lambda: rig.reciter.seen != [])
    writer.close()
    await rig.until(lambda: rig.reciter.cancelled_at != {})
    await rig.idle()


async def test_one_that_goes_does_not_touch_its_neighbours(rig: Any) -> None:
    async def stay(k: int) -> None:
        prompt = f"number {k} "
        body = {"model": "reciter", "prompt": prompt, "max_tokens": 60, "temperature": 0}
        response = await rig.http.post("/v1/completions", json=body)
        assert response.json()["choices"][0]["text"] == (prompt * 9)[:60]

    async def go(k: int) -> None:
        reader, writer = await _open(rig, {"prompt": f"{k}", "max_tokens": 500, "stream": True})
        await reader.readuntil(b"data: ")
        writer.close()

    await asyncio.gather(*(go(k) if k % 4 == 0 else stay(k) for k in range(24)))
    await rig.idle()


async def test_many_streams_at_once_finish_and_leave_nothing(rig: Any) -> None:
    rig.reciter.total_blocks = 4096
    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(base_url=rig.base_url, timeout=60, limits=limits, trust_env=False) as http:

        async def one(k: int) -> str:
            body = {"model": "reciter", "prompt": f"{k}.", "max_tokens": 12, "temperature": 0, "stream": True}
            response = await http.post("/v1/completions", json=body)
            data = [line[6:] for line in response.text.split("\n") if line.startswith("data: {")]
            return "".join(json.loads(item)["choices"][0]["text"] for item in data)

        texts = await asyncio.gather(*(one(k) for k in range(120)))
    assert texts == [(f"{k}." * 12)[:12] for k in range(120)]
    await rig.idle()
    assert (await rig.store.audit()).stray_keys == 0


async def _samples(rig: Any) -> dict[tuple[str, ...], float]:
    text = (await rig.http.get("/metrics")).text
    return {
        (sample.name, *sorted(value for name, value in sample.labels.items() if name not in ("model_name", "worker"))):
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }  # fmt: skip


async def test_metrics_count_clients_that_went_apart_from_cancels(rig: Any) -> None:
    """One goes while it is served, one while it is still admitted; one is cancelled by its id; one is moved away."""
    rig.reciter.hold()
    reader, writer = await _open(rig, {"prompt": "x", "max_tokens": 500, "stream": True})
    await reader.readuntil(b"200 OK")
    writer.close()
    await rig.idle()
    admit, asked = rig.store.admit, asyncio.Event()

    async def never_answered(call: Any) -> Any:
        await admit(call)
        asked.set()
        await asyncio.Event().wait()

    rig.store.admit = never_answered
    _, writer = await _open(rig, {"prompt": "x", "max_tokens": 500})
    await asyncio.wait_for(asked.wait(), 5)
    rig.store.admit = admit
    writer.close()
    await rig.idle()
    async with await rig.service.submit(_call()) as stream:
        await rig.service.cancel(stream.request_id)
        async for _ in stream:
            pass
    async with await rig.service.submit(_call()) as stream:
        stream.break_with(Moved("elsewhere"))
    await rig.store.cancel(stream.request_id)
    await rig.idle()
    samples = await _samples(rig)
    outcomes = {key[1]: count for key, count in samples.items() if key[0] == "headrace:requests_total"}
    assert outcomes == {"disconnected": 2, "cancelled": 1, "Moved": 1}
    assert samples["headrace:e2e_request_latency_seconds_count",] == 1, "only the one that heard how it ended"


def _call() -> Call:
    return Call("", TextPrompt("x"), SamplingParams(max_tokens=400))


async def test_metrics_say_what_happened(rig: Any) -> None:
    await rig.post("/v1/completions", prompt="four", max_tokens=6, temperature=0)
    await rig.events("/v1/completions", prompt="four", max_tokens=6, temperature=0)
    await rig.post("/v1/completions", prompt="four", max_tokens=0)
    await rig.idle()
    samples = await _samples(rig)
    assert samples["headrace:prompt_tokens_total",] == 8
    assert samples["headrace:generation_tokens_total",] == 12
    assert samples["headrace:requests_total", "length"] == 2
    assert samples["headrace:requests_total", "InvalidRequest"] == 1
    assert samples["headrace:time_to_first_token_seconds_count",] == 2
    assert samples["headrace:e2e_request_latency_seconds_count",] == 2
    assert samples["headrace:inter_token_latency_seconds_count",] > 0
    assert samples["headrace:num_requests_running",] == 0
    assert samples["headrace:num_requests_waiting", "no_credit"] == 0
    assert samples["headrace:kv_blocks", "free"] + samples["headrace:kv_blocks", "held"] == 256
    assert samples["headrace:preemptions_total",] == 3
    assert all(value >= 0 for value in samples.values())


async def test_a_scrape_costs_the_same_however_much_the_store_holds(rig: Any) -> None:
    """Prometheus asks every few seconds for ever: it must not walk the keys of every result that is kept."""
    for k in range(3):
        await rig.post("/v1/completions", prompt=f"{k}", max_tokens=1)
    await rig.idle()
    called: list[str] = []
    call = rig.store.twin.call

    def noted(function: str, argument: list[Any]) -> Any:
        called.append(function)
        return call(function, argument)

    rig.store.twin.call = noted
    assert "headrace:store_requests" in (await rig.http.get("/metrics")).text
    assert "census" in called
    assert "inspect" not in called
