"""The gRPC face: statuses with their metadata, cancel and disconnect, deadlines, health, reflection."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from headrace.v1 import inference_pb2 as pb

SERVICE = "headrace.v1.Inference"
LONG = pb.SamplingParams(max_tokens=400, temperature=0)


async def _refusal(call: Any) -> tuple[grpc.StatusCode, str, dict[str, Any]]:
    async def to_the_end() -> None:
        if not hasattr(call, "read"):
            await call
        while await call.read() is not grpc.aio.EOF:
            pass

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await to_the_end()
    return caught.value.code(), caught.value.details(), dict(caught.value.trailing_metadata())


BAD_INPUT = [
    (pb.GenerateRequest(), "prompt"),
    (pb.GenerateRequest(text=""), "prompt"),
    (pb.GenerateRequest(token_ids=pb.TokenIds()), "prompt"),
    (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 4_000_000_000])), "prompt[1]"),
    (pb.GenerateRequest(text="x", sampling=pb.SamplingParams(max_tokens=0)), "max_tokens"),
    (pb.GenerateRequest(text="x", sampling=pb.SamplingParams(max_tokens=-1)), "max_tokens"),
    (pb.GenerateRequest(text="x", sampling=pb.SamplingParams(temperature=float("nan"))), "temperature"),
    (pb.GenerateRequest(text="x", sampling=pb.SamplingParams(top_p=float("inf"))), "top_p"),
    (pb.GenerateRequest(text="x", sampling=pb.SamplingParams(stop=[""])), "stop[0]"),
    (pb.GenerateRequest(text="x" * 600), "prompt"),
]


async def test_bad_input_is_invalid_argument_with_the_field(rig: Any) -> None:
    for request, field in BAD_INPUT:
        code, message, metadata = await _refusal(rig.stub.Generate(request))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert metadata["headrace-field"] == field
        assert message
    assert rig.reciter.seen == []


async def test_an_unknown_model_is_not_found(rig: Any) -> None:
    code, _, metadata = await _refusal(rig.stub.Generate(pb.GenerateRequest(model="nope", text="x")))
    assert code is grpc.StatusCode.NOT_FOUND
    assert metadata["headrace-error"] == "UnknownModel"


async def test_bytes_that_are_no_message_are_the_callers_fault(rig: Any) -> None:
    method = rig.channel.unary_stream(f"/{SERVICE}/Generate")
    for raw in (b"\xff\xff\xff", b"\x0a\x7f"):
        code, message, _ = await _refusal(method(raw))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "not a valid headrace.v1.GenerateRequest" in message


async def test_text_that_is_not_utf8_is_refused_by_the_name_of_its_field(rig: Any) -> None:
    good = pb.GenerateRequest(text="x", sampling=pb.SamplingParams(stop=["ok", "?!"])).SerializeToString()
    method = rig.channel.unary_stream(f"/{SERVICE}/Generate")
    for raw, field in ((b"\x12\x02\xff\xfe", "prompt"), (good.replace(b"?!", b"\xff\xfe"), "stop[1]")):
        code, _, metadata = await _refusal(method(raw))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert metadata["headrace-field"] == field
    assert rig.reciter.seen == []


async def test_a_message_that_is_too_large(rig: Any) -> None:
    code, message, _ = await _refusal(rig.stub.Generate(pb.GenerateRequest(text="x" * (9 << 20))))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "larger than" in message


async def test_dropping_the_call_cancels_the_request_in_the_worker(rig: Any) -> None:
    rig.reciter.hold(after=3)
    call = rig.stub.Generate(pb.GenerateRequest(text="x", sampling=LONG))
    request_id = (await call.read()).accepted.request_id
    received = 0
    while received < 3:
        received += len((await call.read()).delta.token_ids)
    call.cancel()
    await rig.assert_gone_at_once(request_id, received)


async def test_dropping_a_call_that_waits_in_the_queue_takes_it_out(rig: Any) -> None:
    rig.reciter.hold()
    rig.reciter.total_blocks = 64
    while (await rig.store.board())[0].load.total_blocks != 64:  # else all of them would still fit
        await rig.store.deliveries("nobody", "0", 20)
    calls = [rig.stub.Generate(pb.GenerateRequest(text="x", sampling=LONG)) for _ in range(12)]
    for call in calls:
        await call.read()
    assert (await rig.store.census()).waiting > 0
    for call in calls:
        call.cancel()
    rig.reciter.go_on()
    await rig.idle()


async def test_cancel_by_id(rig: Any) -> None:
    rig.reciter.hold()
    call = rig.stub.Generate(pb.GenerateRequest(text="x", sampling=LONG))
    request_id = (await call.read()).accepted.request_id
    assert (await rig.stub.Cancel(pb.CancelRequest(request_id=request_id))).cancelled
    code, _, _ = await _refusal(call)
    assert code is grpc.StatusCode.CANCELLED
    rig.reciter.go_on()
    done = rig.stub.Generate(pb.GenerateRequest(text="x", sampling=pb.SamplingParams(max_tokens=1)))
    ended_id = (await done.read()).accepted.request_id
    while await done.read() is not grpc.aio.EOF:
        pass
    assert not (await rig.stub.Cancel(pb.CancelRequest(request_id=ended_id))).cancelled
    for unknown, code in (("nope", "NOT_FOUND"), (ended_id[:-3] + "000", "NOT_FOUND"), ("", "INVALID_ARGUMENT")):
        told, _, _ = await _refusal(rig.stub.Cancel(pb.CancelRequest(request_id=unknown)))
        assert told.name == code


async def test_the_clients_deadline_reaches_the_store(rig: Any) -> None:
    rig.reciter.hold()
    call = rig.stub.Generate(pb.GenerateRequest(text="x", sampling=LONG), timeout=0.3)
    request_id = (await call.read()).accepted.request_id
    code, _, _ = await _refusal(call)
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    record = rig.twin.keys.request(request_id)
    assert int(rig.twin.keyspace.hget(record, "deadline") or 0) > 0
    rig.reciter.go_on()
    await rig.idle()


async def test_a_failure_of_one_request_is_told_and_harms_nobody(rig: Any) -> None:
    rig.reciter.fail_next = "the logits were not numbers"
    code, message, metadata = await _refusal(rig.stub.Generate(pb.GenerateRequest(text="x", sampling=LONG)))
    assert code is grpc.StatusCode.INTERNAL
    assert (message, metadata["headrace-error"]) == ("the logits were not numbers", "RequestFailed")
    rig.reciter.fail_next = "once more"
    response = await rig.post("/v1/completions", prompt="x", max_tokens=5)
    assert (response.status_code, response.json()["error"]["message"]) == (500, "once more")
    rig.reciter.fail_next = "in a stream"
    events = await rig.events("/v1/completions", prompt="x", max_tokens=5)
    assert events[-1]["error"]["message"] == "in a stream"
    assert (await rig.post("/v1/completions", prompt="x", max_tokens=1)).status_code == 200
    await rig.idle()


async def test_overload_carries_a_time_to_come_back(rig: Any) -> None:
    rig.reciter.hold()
    object.__setattr__(rig.service.config, "max_open_streams", 1)
    first = rig.stub.Generate(pb.GenerateRequest(text="x", sampling=LONG))
    await first.read()
    code, _, metadata = await _refusal(rig.stub.Generate(pb.GenerateRequest(text="x", sampling=LONG)))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert int(metadata["headrace-retry-after-ms"]) >= 1000
    response = await rig.post("/v1/completions", prompt="x")
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    first.cancel()
    rig.reciter.go_on()
    await rig.idle()


async def test_what_is_not_there_yet_says_so(rig: Any) -> None:
    for call in (rig.stub.Attach(pb.AttachRequest()), rig.stub.WatchCapacity(pb.WatchCapacityRequest())):
        code, message, _ = await _refusal(call)
        assert code is grpc.StatusCode.UNIMPLEMENTED
        assert "not offered yet" in message


async def test_models_and_reflection(rig: Any) -> None:
    models = (await rig.stub.ListModels(pb.ListModelsRequest())).models
    assert [(model.id, model.max_context_tokens) for model in models] == [("reciter", 512)]
    stub = reflection_pb2_grpc.ServerReflectionStub(rig.channel)
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    answers = [answer async for answer in stub.ServerReflectionInfo(iter([asked]))]
    names = {service.name for service in answers[0].list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= names


async def test_health_follows_the_workers(rig: Any) -> None:
    stub = health_pb2_grpc.HealthStub(rig.channel)
    serving, away = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    for name in ("", SERVICE):
        assert (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status == serving
    code, _, _ = await _refusal(stub.Check(health_pb2.HealthCheckRequest(service="unknown")))
    assert code is grpc.StatusCode.NOT_FOUND
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
    assert (await watch.read()).status == serving
    rig.reciter.stop()
    assert (await asyncio.wait_for(watch.read(), 5)).status == away
    watch.cancel()
    assert (await rig.http.get("/readyz")).json() == {"ready": False, "store": True, "workers": 0}


async def test_a_request_id_in_metadata_is_checked(rig: Any) -> None:
    request = pb.GenerateRequest(text="x", sampling=pb.SamplingParams(max_tokens=1))
    code, _, metadata = await _refusal(rig.stub.Generate(request, metadata=(("x-request-id", "y" * 200),)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert metadata["headrace-field"] == "x-request-id"
    events = [event async for event in rig.stub.Generate(request, metadata=(("x-request-id", "trace 7"),))]
    assert events[0].accepted.request_id != "trace 7"
