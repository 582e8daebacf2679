"""A whole router in one process: real service and listeners, the store's twin, and a worker that recites.

The worker answers from a script instead of a model: by default it repeats the prompt for ever. Everything between it
and the client is the real thing.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import httpx
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from headrace.chat_template import ChatTemplate
from headrace.frame import FinishReason, Frame, LoadReport, Part
from headrace.logprobs import UNTOLD, TokenLogprob
from headrace.ranking import measured_logprobs
from headrace.request import BoundRequest, Request
from headrace.store.interface import InboxEntry
from headrace.store.keys import incarnation
from headrace.store.twin import Twin
from headrace.store.twin_store import SyncTwinStore, TwinStore
from headrace.text_stream import TextStream
from headrace.tokenizer import Tokenizer
from headrace.v1.inference_pb2_grpc import InferenceStub
from router.config import RouterConfig
from router.ingress.grpc_server import GrpcServer
from router.ingress.http_server import HttpServer
from router.ingress.openai_http import build_app
from router.service import RouterService

MODEL, CONTEXT, BLOCK, EOS = "reciter", 512, 16, 257
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] + '' }}<|end|>\n{% endfor %}"
    "{{ '<|start|>assistant\\n' }}"
)

MOST_STEPS_AFTER_CLOSE = 10

Script = Callable[[tuple[int, ...]], Sequence[int]]
Variant = Callable[[Sequence[int], int], Sequence[int]]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every byte is a token, so that any character beyond ASCII spans several; 256 and 257 are special, 257 is EOS."""
    folder = tmp_path_factory.mktemp("reciter")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|start|>", "<|end|>"])
    backend.save(str(folder / "tokenizer.json"))
    config = {"vocab_size": 300, "max_position_embeddings": CONTEXT, "eos_token_id": EOS}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.load(model_folder)


def repeat_prompt(prompt: tuple[int, ...]) -> Sequence[int]:
    return prompt * (CONTEXT // len(prompt) + 1)


def scored(token_id: int, tops: int | None, choice: int = 0) -> TokenLogprob:
    """The likelier the smaller an id and, a little, the earlier a choice; exact in 32 bits. The likeliest: 0, 1, …"""
    return TokenLogprob(-(token_id + choice / 8) / 64, token_id + 1, tuple((i, -i / 64) for i in range(tops or 0)))


def every_choice_the_same(answer: Sequence[int], _: int) -> Sequence[int]:
    return answer


@dataclass
class Running:
    """One choice of one request in the reciter's batch."""

    bound: BoundRequest
    choice: int
    answer: Sequence[int]
    text: TextStream
    index: int = 0

    def step(self) -> Part:
        request = self.bound.request
        token, first = self.answer[self.index], self.index
        self.index += 1
        self.text.push((token,))
        finish = None
        if self.text.stopped:
            finish = FinishReason.STOP
        elif self.index == request.sampling.max_tokens:
            finish = FinishReason.LENGTH
        part = Part(request.id, self.choice, self.bound.epoch, first, (token,), finish)
        tops = measured_logprobs(request)
        if tops is not None:
            part = replace(part, logprobs=(scored(token, tops, self.choice),))
        asked = request.sampling.prompt_logprobs
        if asked is not None and self.choice == 0 and first == 0:
            rest = (scored(token_id, asked) for token_id in request.prompt_token_ids[1:])
            part = replace(part, prompt_logprobs=(UNTOLD, *rest))
        return part

    def end(self, reason: FinishReason, detail: str) -> Part:
        return Part(self.bound.request.id, self.choice, self.bound.epoch, self.index, (), reason, detail)


@dataclass
class Reciter:
    """A worker in its own thread. `hold` lets it beat but not compute; `fail_next` ends what runs as failed."""

    store: SyncTwinStore
    tokenizer: Tokenizer
    total_blocks: int = 256
    script: Script = repeat_prompt
    variant: Variant = every_choice_the_same
    """What a choice makes of the script's answer."""
    fail_next: str = ""
    seen: list[str] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    """As the store handed them over."""
    cancelled_at: dict[str, int] = field(default_factory=dict)
    """Request → iterations made when its cancel was read."""
    batches: list[frozenset[str]] = field(default_factory=list)
    """Per iteration: the requests it computed."""

    def __post_init__(self) -> None:
        self.worker = incarnation("reciter")
        self.iterations = 0
        self._batch: dict[str, list[Running]] = {}
        """By request, its choices that have not ended."""
        self._last_inbox_id = "0-0"
        self._ended = threading.Event()
        self._iterations_left: float = math.inf
        self._thread = threading.Thread(target=self._loop, name="reciter")

    def start(self) -> None:
        self._report(())
        self._thread.start()

    def stop(self) -> None:
        if not self._ended.is_set():
            self._ended.set()
            self._thread.join(5)
            self.store.leave(self.worker)

    def hold(self, after: int = 0) -> None:
        """Computes so many iterations more, then only beats and takes from its inbox."""
        self._iterations_left = after

    def go_on(self) -> None:
        self._iterations_left = math.inf

    def _loop(self) -> None:
        while not self._ended.is_set():
            computing = self._iterations_left > 0 and bool(self._batch)
            ends = tuple(part for entry in self._inbox(0 if computing else 10) for part in self._take(entry))
            self._report(ends + (self._compute() if computing else ()))

    def _inbox(self, block_ms: int) -> tuple[InboxEntry, ...]:
        return self.store.inbox(self.worker, self._last_inbox_id, block_ms)

    def _take(self, entry: InboxEntry) -> list[Part]:
        self._last_inbox_id = entry.id
        if entry.kind == "bind" and entry.bound is not None:
            request = entry.bound.request
            self.seen.append(request.id)
            self.requests.append(request)
            self._batch[request.id] = [self._begin(entry.bound, choice) for choice in range(request.n)]
        elif entry.kind == "cancel" and (choices := self._batch.pop(entry.request_id, None)) is not None:
            self.cancelled_at[entry.request_id] = self.iterations
            return [running.end(FinishReason.CANCELLED, "") for running in choices]
        return []

    def _begin(self, bound: BoundRequest, choice: int) -> Running:
        request = bound.request
        answer = self.variant(self.script(request.prompt_token_ids), choice)
        return Running(bound, choice, answer, TextStream(self.tokenizer, request.sampling))

    def _compute(self) -> tuple[Part, ...]:
        self.iterations += 1
        self._iterations_left -= 1
        self.batches.append(frozenset(self._batch))
        if self.fail_next:
            parts = [running.end(FinishReason.FAILED, self.fail_next) for running in self._running()]
            self.fail_next = ""
        else:
            parts = [running.step() for running in self._running()]
        for part in parts:
            if part.finish is not None:
                left = [running for running in self._batch[part.request_id] if running.choice != part.choice]
                self._batch[part.request_id] = left
                if not left:
                    del self._batch[part.request_id]
        return tuple(parts)

    def _running(self) -> list[Running]:
        return [running for choices in self._batch.values() for running in choices]

    def _report(self, parts: tuple[Part, ...]) -> None:
        held = sum(len(r.bound.request.prompt_token_ids) // BLOCK + 8 for r in self._running())
        free = max(0, self.total_blocks - held)
        self._seq = getattr(self, "_seq", 0) + 1
        load = LoadReport(
            seq=self._seq, credit_blocks=free, free_slots=64, free_blocks=free, cached_blocks=0,
            held_blocks=self.total_blocks - free, total_blocks=self.total_blocks, block_size=BLOCK, max_context=CONTEXT,
            running=len(self._batch), waiting=0, uncomputed_tokens=0, step_s=0.001, drain_tokens_per_s=100.0,
            iterations=self.iterations, prompt_tokens_total=0, output_tokens_total=0, preemptions_total=3,
            draining=False, model=MODEL, weight_version="w", numerics="n",
        )  # fmt: skip
        reported = self.store.report(self.worker, Frame(load, parts, self._last_inbox_id))
        for request_id in reported.dropped:
            self._batch.pop(request_id, None)


@dataclass
class Rig:
    """What the tests hold in their hands."""

    twin: Twin
    store: TwinStore
    service: RouterService
    reciter: Reciter
    grpc_address: str
    base_url: str
    stub: InferenceStub
    channel: grpc.aio.Channel
    http: httpx.AsyncClient

    async def post(self, path: str, **body: object) -> httpx.Response:
        return await self.http.post(path, json={"model": MODEL, **body})

    async def events(self, path: str, **body: object) -> list[dict[str, object]]:
        """The data of a stream's events, `[DONE]` checked and taken off. The status must be 200."""
        response = await self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        data = [line[6:] for line in response.text.split("\n") if line.startswith("data: ")]
        assert data[-1] == "[DONE]"
        return [json.loads(item) for item in data[:-1]]

    async def until(self, reached: Callable[[], bool]) -> None:
        """Looks again whenever the store changes (the worker beats); fails after 5 s."""
        give_up = time.monotonic() + 5
        while not reached():
            assert time.monotonic() < give_up
            await self.store.deliveries("nobody", "0", 20)

    async def assert_gone_at_once(self, request_id: str, received: int) -> None:
        """After its client went with `received` tokens: the worker, at 20 ms a step, makes few more with the request
        before it reads the cancel (the second look of reconciliation would be fifty later), and at most one after.
        """
        while request_id not in self.reciter.cancelled_at:
            assert len(self.reciter.batches) <= received + MOST_STEPS_AFTER_CLOSE
            self.reciter.hold(after=1)
            await self.store.deliveries("nobody", "0", 20)
        self.reciter.go_on()
        await self.post("/v1/completions", prompt="neighbour", max_tokens=8)
        later = self.reciter.batches[self.reciter.cancelled_at[request_id] :]
        assert len(later) >= 8, "others went on"
        assert sum(request_id in batch for batch in later) <= 1
        await self.idle()
        status = await self.store.status(request_id)
        assert status is not None
        assert status.finishes == ("cancelled",)
        assert status.journal_lengths[0] <= received + MOST_STEPS_AFTER_CLOSE + 1

    async def idle(self) -> None:
        """Returns when nothing waits or runs any more; fails after 5 s."""
        give_up = time.monotonic() + 5
        while True:
            census = await self.store.census()
            if (census.waiting, census.bound) == (0, 0) and self.service._delivery.open_streams == 0:
                return
            assert time.monotonic() < give_up, census
            await self.store.deliveries("nobody", "0", 20)


@pytest.fixture
def twin() -> Twin:
    return Twin("test", MODEL, lambda: time.time_ns() // 1_000_000)


@pytest.fixture
def reciter(twin: Twin, tokenizer: Tokenizer) -> Iterator[Reciter]:
    made = Reciter(SyncTwinStore(twin), tokenizer)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def config(model_folder: Path) -> RouterConfig:
    return RouterConfig("test", "unused", str(model_folder), MODEL, grpc_port=0, http_port=0, drain_s=0.5)


@pytest.fixture
async def rig(twin: Twin, tokenizer: Tokenizer, config: RouterConfig, reciter: Reciter) -> AsyncIterator[Rig]:
    store = TwinStore(twin)
    service = RouterService(config, store, tokenizer, ChatTemplate.load(config.model_path))
    await service.start()
    rpc = GrpcServer(service, "127.0.0.1", 0)
    web = HttpServer(build_app(service), "127.0.0.1", 0, stall_limit_s=config.stall_limit_s)
    await rpc.start()
    await web.start()
    address, url = f"127.0.0.1:{rpc.port}", f"http://127.0.0.1:{web.port}"
    async with (
        grpc.aio.insecure_channel(address) as channel,
        httpx.AsyncClient(base_url=url, timeout=20, trust_env=False) as http,
    ):
        yield Rig(twin, store, service, reciter, address, url, InferenceStub(channel), channel, http)
    await rpc.stop(0)
    await web.stop(0)
    await service.stop()
