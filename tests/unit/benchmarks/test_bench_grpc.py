"""The gRPC transport against a real server on the stubs that follows a script."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest

from benchmarks.drive import Drive
from benchmarks.errors import BenchError, CallFailed
from benchmarks.transports.grpc_stream import GrpcTransport
from benchmarks.workload import Call, Workload
from headrace.v1 import inference_pb2 as pb
from headrace.v1 import inference_pb2_grpc


def delta(first_index: int, *ids: int) -> pb.GenerateEvent:
    return pb.GenerateEvent(delta=pb.Delta(first_index=first_index, token_ids=ids))


def finished(reason: int = pb.FINISH_REASON_LENGTH, detail: str = "") -> pb.GenerateEvent:
    return pb.GenerateEvent(finished=pb.Finished(reason=reason, detail=detail))


class ScriptedServer(inference_pb2_grpc.InferenceServicer):
    """Sends three deltas of 1, 2 and 1 tokens, each only when the client has counted the one before."""

    def __init__(self, watcher) -> None:
        self._watcher = watcher
        self.requests: list[pb.GenerateRequest] = []
        self.written_s: list[float] = []
        self.cancelled = asyncio.Event()

    async def ListModels(self, request, context):
        return pb.ListModelsResponse(models=[pb.Model(id="first"), pb.Model(id="second")])

    async def Generate(self, request, context):
        self.requests.append(request)
        yield pb.GenerateEvent(accepted=pb.Accepted(request_id="r", prompt_tokens=3))
        for first_index, count in ((0, 1), (1, 2), (3, 1)):
            await self._watcher.until_tokens(first_index)
            self.written_s.append(asyncio.get_running_loop().time())
            yield delta(first_index, *range(count))
        yield finished()


@asynccontextmanager
async def serving(servicer: inference_pb2_grpc.InferenceServicer, model: str = "") -> AsyncIterator[GrpcTransport]:
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    transport = GrpcTransport(f"127.0.0.1:{port}")
    try:
        await transport.open(model)
        yield transport
    finally:
        await transport.close()
        await server.stop(None)


CALL = Call(0, 0.0, array("I", [1_000, 2_000, 31_999]), 4)


async def test_times_are_between_the_writes_of_the_script(watcher) -> None:
    server = ScriptedServer(watcher)
    async with serving(server) as transport:
        run = Drive(transport, watcher, 30.0)
        [record] = await run.run(Workload((CALL,), CALL, 1))
    assert (record.error, record.output_tokens, record.deltas) == ("", 4, 3)
    times_s = [run.start_s + time_s for time_s in record.token_s]
    written_s = server.written_s
    assert written_s[0] <= times_s[0] <= written_s[1]  # each delta was seen before the next was written
    assert written_s[1] <= times_s[1] <= written_s[2]
    assert times_s[1] == times_s[2]
    assert written_s[2] <= times_s[3] <= run.start_s + record.end_s
    assert record.ttft_s is not None
    assert record.ttft_s >= written_s[0] - run.start_s - record.scheduled_s
    assert record.itl_s[1] == 0.0
    assert sum(record.itl_s) == pytest.approx(3 * (record.tpot_s or 0))


async def test_asks_for_exactly_the_prompt_and_the_length(watcher) -> None:
    server = ScriptedServer(watcher)
    async with serving(server, model="second") as transport:
        await Drive(transport, watcher, 30.0).run(Workload((CALL,), CALL, 1))
    [request] = server.requests
    assert request.model == "second"
    assert list(request.token_ids.ids) == [1_000, 2_000, 31_999]
    assert (request.sampling.max_tokens, request.sampling.ignore_eos, request.sampling.temperature) == (4, True, 0.0)


class EndingServer(inference_pb2_grpc.InferenceServicer):
    """Ends each call as its output length says."""

    async def ListModels(self, request, context):
        return pb.ListModelsResponse(models=[pb.Model(id="m")])

    async def Generate(self, request, context):
        yield delta(0, 5)
        match request.sampling.max_tokens:
            case 1:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
            case 2:
                yield finished(pb.FINISH_REASON_FAILED, "NaN logits")
            case 3:
                return
            case 4:
                yield finished(pb.FINISH_REASON_DEADLINE)


@pytest.mark.parametrize(
    ("output_tokens", "kind", "detail"),
    [
        (1, "grpc_resource_exhausted", "the queue is full"),
        (2, "failed", "NaN logits"),
        (3, "stream_cut", "the stream ended without `finished`"),
        (4, "deadline", ""),
    ],
)
async def test_every_other_end_is_told_by_its_kind(output_tokens: int, kind: str, detail: str) -> None:
    async with serving(EndingServer()) as transport:
        with pytest.raises(CallFailed) as failure:
            async for _ in transport.stream(Call(0, 0.0, array("I", [1]), output_tokens)):
                pass
    assert (failure.value.kind, failure.value.detail) == (kind, detail)


class EndlessServer(EndingServer):
    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def Generate(self, request, context):
        try:
            yield delta(0, 5)
            await asyncio.Event().wait()
        finally:
            self.left.set()


async def test_leaving_a_stream_early_cancels_the_call_at_the_server() -> None:
    server = EndlessServer()
    async with serving(server) as transport:
        stream = transport.stream(CALL)
        assert (await anext(stream)).count == 1
        await stream.aclose()
        async with asyncio.timeout(10):
            await server.left.wait()


async def test_an_unknown_model_is_one_line() -> None:
    with pytest.raises(BenchError, match="serves m, not other"):
        async with serving(EndingServer(), model="other"):
            pass
