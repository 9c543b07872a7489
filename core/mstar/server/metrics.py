"""What `GET /metrics` says: counters and histograms recorded as things happen, and the engine's state at a scrape.

Belongs to the server's event loop; one registry per engine. Labels come from the graph, the tasks and fixed sets;
what a client or a model names freely is bounded, so that no series grow without end. Knows nothing about HTTP.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import prometheus_client
import torch
from prometheus_client import CollectorRegistry, Counter, Histogram, Info, ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

import mstar
from mstar.errors import RequestError
from mstar.ipc.messages import Stats, WorkerStatus
from mstar.plugin.spec import ModelSpec
from mstar.server.requests import EngineState
from mstar.server.results import Result
from mstar.types import AudioChunk, Chunk

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_MOST_VALUES = 64  # of a label that others fill
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "WEBSOCKET")
_LONG_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_UNDERRUN_S = (0, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_REAL_TIME = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1, 1.25, 1.5, 2, 3, 5, 10)
_NOTHING = Stats(
    running=0, waiting=0, steps=0, pools={}, slots_used=0, swapped=0, swaps=0, cache_hit_tokens=0,
    cache_queried_tokens=0, method_s={},
)  # fmt: skip


class Timeline:
    """What one request delivered, and when; `Metrics` adds it up.

    Args:
        task: as far as it is known.
        is_stream: whether somebody listens as the chunks come.
        submitted: a time of `time.monotonic`.

    Attributes:
        underrun_s: how long a player would have had nothing to play that begins at the first audio and waits when it
            must. Several outputs side by side are played side by side.
    """

    def __init__(self, *, task: str, is_stream: bool, submitted: float) -> None:
        self.task = task
        self.is_stream = is_stream
        self.submitted = submitted
        self.first_output: float | None = None
        self.first_audio: float | None = None
        self.audio_s = 0.0
        self.underrun_s = 0.0
        self._played_at: dict[int, float] = {}  # output -> when all its audio will have been played

    def add(self, chunks: Iterable[Chunk], *, now: float) -> None:
        """Chunks are delivered."""
        for chunk in chunks:
            self.first_output = self.first_output or now
            if isinstance(chunk, AudioChunk) and len(chunk.samples):
                self.first_audio = self.first_audio or now
                seconds = len(chunk.samples) / chunk.sample_rate
                played_at = self._played_at.get(chunk.index, now)
                self.underrun_s += max(now - played_at, 0.0)
                self._played_at[chunk.index] = max(now, played_at) + seconds
                self.audio_s += seconds


class Metrics:
    """The metrics of one engine.

    Example:
        body, content_type = engine.metrics.render()
    """

    def __init__(
        self, state: EngineState, *, spec: ModelSpec, model: str, workers: Callable[[], list[WorkerStatus]] = list
    ) -> None:
        prometheus_client.disable_created_metrics()  # a second series for each, which nobody reads
        self._registry = registry = CollectorRegistry()
        self._seen: dict[str, set[str]] = {}

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"mstar_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, *labels: str, buckets: tuple[float, ...] = _LONG_S) -> Histogram:
            return Histogram(f"mstar_{name}", text, labels, registry=registry, buckets=buckets)

        self._requests = counter("requests_total", "Requests that are over", "task", "outcome")
        self._errors = counter("request_errors_total", "Requests that ended with an error", "status", "code")
        self._responses = counter("http_responses_total", "HTTP responses", "route", "method", "status")
        self._queue = histogram("queue_seconds", "From a request's arrival to its start on the worker", "task")
        self._first_output = histogram("time_to_first_output_seconds", "From arrival to the first output", "task")
        self._first_audio = histogram("time_to_first_audio_seconds", "From arrival to the first audio", "task")
        self._request = histogram("request_seconds", "From arrival to the end, of requests that ended well", "task")
        text = "Seconds a request took for each second of its audio"
        self._real_time = histogram("real_time_factor", text, "task", buckets=_REAL_TIME)
        text = "How long a player that began at the first audio starved, of a stream"
        self._underrun = histogram("audio_underrun_seconds", text, "task", buckets=_UNDERRUN_S)
        self._audio = counter("audio_seconds_total", "Seconds of audio delivered", "task")
        self._tokens = counter("tokens_total", "Tokens of requests that ended well", "task", "kind")
        self._counts = counter("counts_total", "What the model's nodes counted", "name")
        text = "How much later than asked the event loop woke"
        self._lag = histogram("event_loop_lag_seconds", text, buckets=_SHORT_S)
        versions = {"version": mstar.__version__, "python": platform.python_version(), "torch": torch.__version__}
        Info("mstar_build", "What is running", registry=registry).info(versions | {"plugin": spec.name, "model": model})
        registry.register(_StateCollector(state, workers))
        ProcessCollector(registry=registry)

    def render(self) -> tuple[bytes, str]:
        """All metrics in Prometheus's text format, and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE

    def collect(self) -> Iterator[Metric]:
        """All metrics, with the text that explains them."""
        return iter(self._registry.collect())

    # -- what happens ----------------------------------------------------------------------------------------

    def record_response(self, route: str, *, method: str, status: int) -> None:
        """A response. `route` is the route's template, never the path a client asked for; "" where none fits."""
        method = method if method in _METHODS else "other"
        self._responses.labels(self._bounded("route", route or "none"), method, str(status)).inc()

    def record_start(self, task: str, *, queued_s: float) -> None:
        """A request starts on the worker."""
        self._queue.labels(task).observe(queued_s)

    def record_chunks(self, timeline: Timeline, chunks: Iterable[Chunk], *, now: float) -> None:
        """Chunks of a request are delivered."""
        had_output, had_audio, audio_s = timeline.first_output, timeline.first_audio, timeline.audio_s
        timeline.add(chunks, now=now)
        if had_output is None and timeline.first_output is not None:
            self._first_output.labels(timeline.task).observe(now - timeline.submitted)
        if had_audio is None and timeline.first_audio is not None:
            self._first_audio.labels(timeline.task).observe(now - timeline.submitted)
        if timeline.audio_s > audio_s:
            self._audio.labels(timeline.task).inc(timeline.audio_s - audio_s)

    def record_end(
        self, timeline: Timeline, *, now: float, result: Result | None = None, error: RequestError | None = None
    ) -> None:
        """A request is over."""
        task = timeline.task
        outcome = "aborted" if error is not None and error.code == "aborted" else "error"
        if result is not None:
            outcome = result.finish_reason
            seconds = now - timeline.submitted
            self._request.labels(task).observe(seconds)
            if timeline.audio_s:
                self._real_time.labels(task).observe(seconds / timeline.audio_s)
            for name, number in _positive(result.usage):
                self._tokens.labels(task, self._bounded("kind", name.removesuffix("_tokens"))).inc(number)
            for name, number in _positive(result.counts):
                self._counts.labels(self._bounded("name", name)).inc(number)
        elif error is not None and outcome == "error":
            self._errors.labels(str(error.status), self._bounded("code", str(error.code or "none"))).inc()
        if timeline.is_stream and timeline.audio_s:
            self._underrun.labels(task).observe(timeline.underrun_s)
        self._requests.labels(task, self._bounded("outcome", outcome)).inc()

    def record_lag(self, seconds: float) -> None:
        """The event loop woke so much later than it should have."""
        self._lag.observe(max(seconds, 0.0))

    def _bounded(self, label: str, value: str) -> str:
        """`value`, or "other" once the label has had too many."""
        seen = self._seen.setdefault(label, set())
        if len(seen) < _MOST_VALUES:
            seen.add(value)
        return value if value in seen else "other"


def _positive(numbers: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """What a counter takes; a model may report anything."""
    return ((name, number) for name, number in numbers.items() if isinstance(number, int | float) and number > 0)


class _StateCollector:
    """Reads the engine's state and the worker's last statistics when somebody asks."""

    def __init__(self, state: EngineState, workers: Callable[[], list[WorkerStatus]]) -> None:
        self._state = state
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        state, stats = self._state, self._state.stats or _NOTHING
        step_s = state.long_step.seconds if state.long_step is not None else 0
        calls, rows, seconds = ({name: entry[i] for name, entry in stats.method_s.items()} for i in range(3))
        used, pages = ({name: pool[i] for name, pool in stats.pools.items()} for i in range(2))
        yield _gauge("ready", "1 while new requests are taken in", state.unready is None)
        yield _gauge("requests_running", "Requests open on the worker", state.num_running)
        yield _gauge("requests_waiting", "Requests being encoded or queued", state.num_waiting)
        yield _gauge("requests_running_limit", "What --max-num-seqs allows in all workers", state.limits.max_running)
        workers = {str(one.worker): one for one in self._workers()}
        states = {name: one.state == "ready" for name, one in workers.items()}
        restarts = {name: one.restarts for name, one in workers.items()}
        yield _gauge("worker_ready", "1 while the worker's process can work", states, label="worker")
        yield _counter("worker_restarts", "Times that a worker was started again", restarts, label="worker")
        yield _gauge("requests_waiting_limit", "What --max-queue allows", state.limits.max_queue)
        yield _gauge("long_step_seconds", "Age of the worker's step if it lasts longer than a second, else 0", step_s)
        yield _counter("stalls", "Steps that took longer than --stall-timeout", state.num_stalls)
        compiled = state.compiled
        yield _gauge("compiled_methods", "Methods that run as compiled code", compiled.num_methods)
        yield _gauge("compile_seconds", "What compiling, or loading its results, took at the start", compiled.seconds)
        yield _counter("compile_builds", "Artifacts built at the start, not found in the cache", compiled.num_built)
        yield _counter("steps", "Batches run", stats.steps)
        yield _gauge("kv_pages_used", "KV pages in use, by module", used, label="pool")
        yield _gauge("kv_pages", "KV pages there are, by module", pages, label="pool")
        yield _gauge("slot_rows_used", "Rows of per-request device state in use", stats.slots_used)
        yield _counter("kv_swaps", "Times that a request, or an item of it, was moved off the device", stats.swaps)
        yield _gauge("kv_swapped", "Requests, or items of them, that are off the device now", stats.swapped)
        yield _counter("prefix_cache_queried_tokens", "Tokens looked up in the cache", stats.cache_queried_tokens)
        yield _counter("prefix_cache_hit_tokens", "Tokens found in the prefix cache", stats.cache_hit_tokens)
        queries, hits, held = stats.encoder_cache
        yield _counter("encoder_cache_queries", "Calls looked up in the encoder cache", queries)
        yield _counter("encoder_cache_hits", "Calls that need not run, as an equal one has", hits)
        yield _gauge("encoder_cache_bytes", "What the outputs in the encoder cache take", held)
        yield _counter("method_calls", "Batches, by node method", calls, label="method")
        yield _counter("method_rows", "Rows of batches, by node method", rows, label="method")
        yield _counter("method_seconds", "Time in the method and its hooks", seconds, label="method")


def _gauge(name: str, text: str, values: float | Mapping[str, float], *, label: str = "") -> Metric:
    return _filled(GaugeMetricFamily(f"mstar_{name}", text, labels=[label] if label else []), values)


def _counter(name: str, text: str, values: float | Mapping[str, float], *, label: str = "") -> Metric:
    return _filled(CounterMetricFamily(f"mstar_{name}", text, labels=[label] if label else []), values)


def _filled(family: Any, values: float | Mapping[str, float]) -> Metric:
    for name, value in values.items() if isinstance(values, Mapping) else [("", values)]:
        family.add_metric([name] if name else [], float(value))
    filled: Metric = family
    return filled
