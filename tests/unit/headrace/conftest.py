"""Small real tokenizers, one for each family that token bytes are derived for, and a small real gRPC server."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from headrace import errors, wire
from headrace.events import Accepted, Delta, Event, Finished
from headrace.frame import FinishReason
from headrace.sampling import SamplingParams
from headrace.tokenizer import Tokenizer
from headrace.v1 import inference_pb2 as pb
from headrace.v1.inference_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server

M = TypeVar("M")
C = TypeVar("C")
SENTENCES = [
    "The turbine turns while the water runs.",
    "DEFGHIJ, then KLMNOP: the alphabet goes on.",
    "日本語の文章と😀🔥絵文字、そして水。",
    "naïve café über straße — “quoted” …",
]
CONFIG = {"vocab_size": 700, "max_position_embeddings": 512, "eos_token_id": 1}


def save(folder: Path, backend: tokenizers.Tokenizer, config: dict[str, object]) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def byte_level_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Byte-level BPE, as GPT-2, Llama 3, Qwen and SmolLM have it; ids 0 and 1 are special."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES, trainer)
    backend.add_tokens(["<tool call>"])
    return save(tmp_path_factory.mktemp("byte_level"), backend, CONFIG)


@pytest.fixture(scope="session")
def tokenizer(byte_level_folder: Path) -> Tokenizer:
    return Tokenizer.load(byte_level_folder)


@pytest.fixture(scope="session")
def byte_fallback_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """SentencePiece's way, as Llama 2 and Gemma have it: U+2581 for a space, `<0xNN>` where a character is unknown."""
    pieces = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "water", "語", "a", "b", "the"]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True, unk_token="</s>")
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer.load(save(tmp_path_factory.mktemp("byte_fallback"), backend, CONFIG))


@pytest.fixture(scope="session")
def word_piece_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A family without byte tokens, for the general way of finding a token's text."""
    pieces = ["[UNK]", "[SEP]", "tur", "##bine", "runs"]
    backend = tokenizers.Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return Tokenizer.load(save(tmp_path_factory.mktemp("word_piece"), backend, CONFIG))


class Reciter(InferenceServicer):
    """A real, small server: it gives the prompt back, a character a token.

    A prompt that begins with `wait` stops after its text until it is cancelled; one that begins with `fail` ends as
    failed, one that begins with `break off` closes its stream without an ending.
    """

    def __init__(self) -> None:
        self.cancelled: queue.Queue[str] = queue.Queue()
        self.peers: set[str] = set()
        self.sampling: list[SamplingParams] = []

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateEvent]:
        call = await accept(context, wire.generate_request_from_proto, request)
        text = call.prompt if isinstance(call.prompt, str) else "".join(map(chr, call.prompt))
        async for event in self._recite(call.model, text, call.sampling, context):
            yield wire.event_to_proto(event)

    async def Chat(self, request: pb.ChatRequest, context: Any) -> AsyncIterator[pb.GenerateEvent]:
        call = await accept(context, wire.chat_request_from_proto, request)
        text = "|".join(f"{m['role']}:{m['content']}" for m in call.messages)
        async for event in self._recite(call.model, text, call.sampling, context):
            yield wire.event_to_proto(event)

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        self.peers.add(context.peer())
        return pb.ListModelsResponse(models=[pb.Model(id="reciter", max_context_tokens=512)])

    async def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelResponse:
        if not request.request_id.startswith("r-"):
            await refuse(context, errors.UnknownRequest("no such request", field="request_id"))
        return pb.CancelResponse(cancelled=request.request_id != "r-ended")

    async def _recite(self, model: str, text: str, sampling: SamplingParams, context: Any) -> AsyncIterator[Event]:
        self.peers.add(context.peer())
        self.sampling.append(sampling)
        if model not in ("", "reciter"):
            await refuse(context, errors.UnknownModel(f"no model {model!r}", field="model"))
        if text == "busy":
            await refuse(context, errors.Overloaded("the queue\nis full", retry_after_s=1.25))
        request_id, ended = f"r-{len(self.sampling)}", False
        # Not by `except CancelledError`: a cancel that arrives during a write never enters this generator.
        context.add_done_callback(lambda _: ended or self.cancelled.put(request_id))
        yield Accepted(request_id, len(text))
        for i, character in enumerate(text[: sampling.max_tokens]):
            yield Delta(0, i, (ord(character),), character)
        if text.startswith("wait"):
            await asyncio.Event().wait()
        ended = True
        if not text.startswith("break off"):
            failed = text.startswith("fail")
            reason = FinishReason.FAILED if failed else FinishReason.STOP
            yield Finished(0, reason, len(text), len(text), "the logits were NaN" if failed else "")


async def refuse(context: Any, error: errors.HeadraceError) -> None:
    status = wire.status_from_error(error)
    await context.abort(status.code, status.message, status.metadata)


async def accept(context: Any, parse: Callable[[M], C], message: M) -> C:
    try:
        return parse(message)
    except errors.HeadraceError as error:
        await refuse(context, error)
        raise


@dataclass(frozen=True)
class RunningReciter:
    address: str
    servicer: Reciter

    def next_cancelled(self) -> str:
        """The id of the next request the server saw cancelled."""
        return self.servicer.cancelled.get(timeout=10)


@pytest.fixture
def reciter() -> Iterator[RunningReciter]:
    """On its own thread and event loop, so that blocking clients can be tested against it."""
    servicer, started = Reciter(), queue.Queue[RunningReciter]()
    ended = asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        server = grpc.aio.server()
        add_InferenceServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        started.put(RunningReciter(f"127.0.0.1:{port}", servicer))
        await ended.wait()
        await server.stop(None)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        yield started.get(timeout=10)
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(10)
        loop.close()
