"""`headrace.v1.Inference/Generate` over gRPC, on the generated stubs: what any gRPC client sees, for little CPU."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from itertools import cycle

import grpc
import grpc.aio

from benchmarks.errors import BenchError, CallFailed
from benchmarks.transports import TokenDelta
from benchmarks.workload import Call
from headrace.v1 import inference_pb2 as pb
from headrace.v1.inference_pb2_grpc import InferenceStub

CONNECTIONS = 4
"""The routers of a node share its port, one connection staying with one of them: several reach more than one router."""
OPEN_TIMEOUT_S = 10.0
FULL_ENDS = (pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH)


class GrpcTransport:
    """Calls take the connections in turn."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._model = ""
        self._channels: list[grpc.aio.Channel] = []

    async def open(self, model: str) -> str:
        # Channels with equal options would share one connection.
        options = (("grpc.use_local_subchannel_pool", 1),)
        self._channels = [grpc.aio.insecure_channel(self._target, options) for _ in range(CONNECTIONS)]
        self._stubs = cycle([InferenceStub(channel) for channel in self._channels])
        try:
            answer = await next(self._stubs).ListModels(pb.ListModelsRequest(), timeout=OPEN_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            why = f"cannot reach {self._target}: {error.details() or error.code().name}"
            raise BenchError(f"{why}; is the cluster up (`headrace up`)?") from None
        known = [listed.id for listed in answer.models]
        if not known or (model and model not in known):
            raise BenchError(f"{self._target} serves {', '.join(known) or 'no model'}, not {model or 'any'}")
        self._model = model or known[0]
        return self._model

    async def stream(self, call: Call) -> AsyncGenerator[TokenDelta, None]:
        rpc = next(self._stubs).Generate(self._request(call))
        finished = False
        try:
            async for message in rpc:
                event = message.WhichOneof("event")
                if event == "delta":
                    yield TokenDelta(len(message.delta.token_ids), message.delta.first_index)
                elif event == "finished":
                    finished = True
                    _check_end(message.finished)
        except grpc.aio.AioRpcError as error:
            raise CallFailed(f"grpc_{error.code().name.lower()}", error.details() or "") from None
        finally:
            rpc.cancel()  # without effect on a call that has ended
        if not finished:
            raise CallFailed("stream_cut", "the stream ended without `finished`")

    def _request(self, call: Call) -> pb.GenerateRequest:
        return pb.GenerateRequest(
            model=self._model,
            token_ids=pb.TokenIds(ids=call.prompt_token_ids),
            sampling=pb.SamplingParams(max_tokens=call.output_tokens, temperature=0.0, ignore_eos=True),
        )

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()


def _check_end(finished: pb.Finished) -> None:
    if finished.reason not in FULL_ENDS:
        name = pb.FinishReason.Name(finished.reason).removeprefix("FINISH_REASON_").lower()
        raise CallFailed(name, finished.detail)
