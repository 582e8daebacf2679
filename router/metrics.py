"""What Prometheus sees of a router. Names follow vLLM's where one exists, with `headrace:` in front.

Counters and histograms are this router's own. Gauges of workers and of the queue are read from the store when scraped,
so every router shows the same ones: aggregate them with `max`, never with `sum`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from headrace.errors import HeadraceError
from headrace.events import Delta, Finished
from headrace.frame import LoadReport
from headrace.store.interface import BoardRow, Census

LoadValue = Callable[[LoadReport], float]
"""Reads one number off a load report."""

DISCONNECTED = "disconnected"

_TTFT_BUCKETS_S = (0.01, 0.02, 0.04, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_ITL_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_E2E_BUCKETS_S = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0)


class RouterMetrics:
    """One per router, with a registry of its own, so that two in one process do not collide."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        self._board = BoardCollector(model)
        self.registry.register(self._board)
        self._ttft = self._histogram("time_to_first_token_seconds", "From call to first token.", _TTFT_BUCKETS_S)
        self._itl = self._histogram("inter_token_latency_seconds", "Between tokens of one choice.", _ITL_BUCKETS_S)
        self._e2e = self._histogram(
            "e2e_request_latency_seconds",
            "From call to the last choice's end, for whatever reason; not for clients that went before it.",
            _E2E_BUCKETS_S,
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of accepted requests.")
        self._generation_tokens = self._counter("generation_tokens", "Output tokens delivered.")
        self._requests = Counter(
            "headrace:requests",
            f"Calls by outcome: a finish reason, the error's name, or {DISCONNECTED!r} where the client went first.",
            ("model_name", "outcome"),
            registry=self.registry,
        )
        self._open = Gauge(
            "headrace:open_streams", "Requests this router delivers now.", ("model_name",), registry=self.registry
        ).labels(model)

    def refused(self, error: HeadraceError) -> None:
        """A call that became no request, or whose stream broke."""
        self._requests.labels(self._model, type(error).__name__).inc()

    def disconnected(self) -> None:
        """A client that went before its answer's end, or took nothing of it for the stall limit."""
        self._requests.labels(self._model, DISCONNECTED).inc()

    def accepted(self, prompt_tokens: int) -> None:
        self._prompt_tokens.inc(prompt_tokens)

    def timer(self, started_s: float, choices: int) -> RequestTimer:
        """A clock for one request; `started_s` is `time.monotonic` at its call."""
        return RequestTimer(self, started_s, choices)

    def exposition(self, board: Iterable[BoardRow], census: Census | None, open_streams: int) -> bytes:
        """The text that Prometheus reads. `census` None: the store is away, and only our own numbers are known."""
        self._open.set(open_streams)
        self._board.rows, self._board.census = tuple(board), census
        return generate_latest(self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(f"headrace:{name}", text, ("model_name",), registry=self.registry, buckets=buckets)
        return made.labels(self._model)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"headrace:{name}", text, ("model_name",), registry=self.registry).labels(self._model)


class RequestTimer:
    """Times one request by the events it delivers."""

    def __init__(self, metrics: RouterMetrics, started_s: float, choices: int) -> None:
        self._metrics = metrics
        self._started_s = started_s
        self._last_token_s: dict[int, float] = {}
        self._running = choices

    def observe(self, events: tuple[Delta | Finished, ...]) -> None:
        now = time.monotonic()
        for event in events:
            if isinstance(event, Finished):
                self._end(now, event)
            elif event.token_ids:
                self._tokens(now, event)

    def unfinished(self, error: HeadraceError | None) -> None:
        """The stream was left before its last choice's end: it broke with `error`, or else its client went."""
        if error is None:
            self._metrics.disconnected()
        else:
            self._metrics.refused(error)

    def _tokens(self, now: float, event: Delta) -> None:
        metrics = self._metrics
        metrics._generation_tokens.inc(len(event.token_ids))
        last = self._last_token_s.get(event.choice)
        if last is not None:
            metrics._itl.observe((now - last) / len(event.token_ids))
        elif not self._last_token_s:
            metrics._ttft.observe(now - self._started_s)
        self._last_token_s[event.choice] = now

    def _end(self, now: float, event: Finished) -> None:
        self._running -= 1
        if self._running == 0:
            self._metrics._e2e.observe(now - self._started_s)
            self._metrics._requests.labels(self._metrics._model, event.reason.value).inc()


class BoardCollector(Collector):
    """Turns the last board and census into metrics."""

    def __init__(self, model: str) -> None:
        self.rows: tuple[BoardRow, ...] = ()
        self.census: Census | None = None
        self._model = model

    def collect(self) -> Iterator[Metric]:
        yield self._per_worker("num_requests_running", "Requests in the last iteration.", lambda load: load.running)
        yield self._per_worker("iteration_seconds", "Duration of the last iteration.", lambda load: load.step_s)
        yield self._per_worker(
            "credit_blocks", "Blocks of new work the worker reported.", lambda load: load.credit_blocks
        )
        yield self._per_worker("uncomputed_tokens", "Prefill backlog.", lambda load: load.uncomputed_tokens)
        yield self._blocks()
        yield self._waiting()
        yield self._waited()
        yield self._totals("preemptions", "Requests that lost their blocks.", lambda load: load.preemptions_total)
        yield self._totals("iterations", "Forward passes.", lambda load: load.iterations)
        yield self._totals("worker_prompt_tokens", "Prompt tokens computed.", lambda load: load.prompt_tokens_total)
        yield self._totals("worker_generation_tokens", "Tokens sampled.", lambda load: load.output_tokens_total)
        yield self._totals("prefix_cache_queries", "Tokens looked up.", lambda load: load.prefix_tokens_total)
        yield self._totals(
            "prefix_cache_hits", "Of these, the ones found computed.", lambda load: load.prefix_hit_tokens_total
        )
        yield self._totals(
            "host_kv_hits", "Of these, the ones read back from host memory.", lambda load: load.host_hit_tokens_total
        )
        yield self._totals("slot_steps", "Batch slots times forward passes.", lambda load: load.slot_steps_total)
        yield self._totals(
            "slot_steps_wasted", "Of these, the ones that advanced nobody.", lambda load: load.slot_steps_wasted_total
        )
        yield self._totals("rows", "Tokens computed, replays included.", lambda load: load.rows_total)
        yield self._totals("padding_rows", "Tokens computed only to pad a batch.", lambda load: load.padding_rows_total)
        if self.census is not None:
            yield self._store_counts(self.census)

    def _per_worker(self, name: str, text: str, value: LoadValue) -> Metric:
        family = GaugeMetricFamily(f"headrace:{name}", text, labels=("model_name", "worker"))
        for row in self.rows:
            family.add_metric((self._model, row.worker), value(row.load))
        return family

    def _totals(self, name: str, text: str, value: LoadValue) -> Metric:
        family = CounterMetricFamily(f"headrace:{name}", text, labels=("model_name", "worker"))
        for row in self.rows:
            family.add_metric((self._model, row.worker), value(row.load))
        return family

    def _blocks(self) -> Metric:
        family = GaugeMetricFamily(
            "headrace:kv_blocks", "KV blocks by state.", labels=("model_name", "worker", "state")
        )
        for row in self.rows:
            states = {"free": row.load.free_blocks, "cached": row.load.cached_blocks, "held": row.load.held_blocks}
            for state, count in states.items():
                family.add_metric((self._model, row.worker, state), count)
        return family

    def _waiting(self) -> Metric:
        """Waiting in the store for credit, and waiting at a worker for the reasons it gives."""
        family = GaugeMetricFamily(
            "headrace:num_requests_waiting", "Requests by reason.", labels=("model_name", "reason")
        )
        reasons = {"no_credit": self.census.waiting} if self.census is not None else {}
        for row in self.rows:
            for reason, count in row.load.waiting_by_reason:
                reasons[reason] = reasons.get(reason, 0) + count
        for reason, count in sorted(reasons.items()):
            family.add_metric((self._model, reason), count)
        return family

    def _waited(self) -> Metric:
        family = CounterMetricFamily(
            "headrace:waited_seconds",
            "Queue time at the worker by reason; the reasons sum to all of it.",
            labels=("model_name", "worker", "reason"),
        )
        for row in self.rows:
            for reason, seconds in row.load.waited_s_by_reason:
                family.add_metric((self._model, row.worker, reason), seconds)
        return family

    def _store_counts(self, census: Census) -> Metric:
        text = "Requests in the store that have not ended."
        family = GaugeMetricFamily("headrace:store_requests", text, labels=("model_name", "state"))
        for state, count in {"waiting": census.waiting, "bound": census.bound}.items():
            family.add_metric((self._model, state), count)
        return family
