"""A worker's numbers for Prometheus, on request. They are counted where they arise, in memory; a scrape runs in the
exporter's own threads, reads them, and asks the server how the queue stands. No image and no prompt is in them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Protocol, Self

import redis
import redis.exceptions as redis_errors

from worker.link import own_client
from worker.queue_facts import QueueFacts, read_facts
from worker.settings import Settings, SettingsError

SCRAPE_TIMEOUT_S = 2.0
STAGE_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
QUESTION_BUCKETS = (1, 2, 3, 4, 5, 6, 7, 8)


class EngineStats(Protocol):
    """What an engine that counts tells; the properties of `engine.Stats`."""

    @property
    def image_cache_hits(self) -> int: ...
    @property
    def image_cache_misses(self) -> int: ...
    @property
    def image_cache_bytes(self) -> int: ...
    @property
    def graphs(self) -> int: ...
    @property
    def allocated_bytes(self) -> int: ...
    @property
    def reserved_bytes(self) -> int: ...


class NoMetrics:
    """What a worker tells its metrics; here nobody listens."""

    def asked(self, questions: int) -> None:
        """A request was read."""

    def ended(self, status: str, code: str, **stages_ms: float | None) -> None:
        """A job ended, with the milliseconds of the stages that it reached."""

    def answers(self, model: str, hashes: Mapping[str, str], stats: Callable[[], EngineStats] | None) -> None:
        """The verified checkpoint's identity, and how to ask its engine for its numbers, from any thread."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop listening."""


class Metrics(NoMetrics):
    """The same, served over HTTP at `/metrics` until the block ends.

    Raises:
        SettingsError: the library is not installed, or the address cannot be listened on.
    """

    def __init__(self, connection: redis.Redis, settings: Settings) -> None:
        try:
            import prometheus_client as prometheus
        except ImportError as error:
            raise SettingsError(
                "metrics_port needs the extra `metrics`: pip install 'cua-screenshot-worker[worker,metrics]'"
            ) from error
        registry = prometheus.CollectorRegistry()
        self._jobs = prometheus.Counter(
            "cua_jobs", "Jobs that this worker ended.", ["status", "code"], registry=registry
        )
        self._stages = prometheus.Histogram(
            "cua_stage_seconds", "Time of a job's stage.", ["stage"], registry=registry, buckets=STAGE_BUCKETS_S
        )
        self._questions = prometheus.Histogram(
            "cua_request_questions", "Questions of a request.", registry=registry, buckets=QUESTION_BUCKETS
        )
        self._checkpoint = prometheus.Info("cua_checkpoint", "The verified checkpoint that answers.", registry=registry)
        self._engine_stats: Callable[[], EngineStats] | None = None
        self._settings = settings
        # Its own connection: it neither waits for a job's nor holds it up.
        self._redis = own_client(connection, timeout_s=SCRAPE_TIMEOUT_S)
        registry.register(_Scrape(self._read_facts, self._read_stats))
        host, port = settings.metrics_host, settings.metrics_port
        try:
            self._server, self._thread = prometheus.start_http_server(port, host, registry)
        except OSError as error:
            raise SettingsError(
                f"metrics cannot be served at {host}:{port}: {error.strerror}; choose another metrics_port"
            ) from error

    def asked(self, questions: int) -> None:
        """A request was read."""
        self._questions.observe(questions)

    def ended(self, status: str, code: str, **stages_ms: float | None) -> None:
        """A job ended."""
        self._jobs.labels(status, code).inc()
        for stage, time_ms in stages_ms.items():
            if time_ms is not None:
                self._stages.labels(stage.removesuffix("_ms")).observe(time_ms / 1000)

    def answers(self, model: str, hashes: Mapping[str, str], stats: Callable[[], EngineStats] | None) -> None:
        """The identity, as labels."""
        self._checkpoint.info({"model": model} | {re.sub(r"\W", "_", name): digest for name, digest in hashes.items()})
        self._engine_stats = stats

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._redis.close()

    def _read_facts(self) -> QueueFacts | None:
        try:
            return read_facts(self._redis, self._settings.keys)
        except redis_errors.RedisError:
            return None

    def _read_stats(self) -> EngineStats | None:
        return self._engine_stats() if self._engine_stats else None


class _Scrape:
    """What is read when a scrape asks."""

    def __init__(self, facts: Callable[[], QueueFacts | None], stats: Callable[[], EngineStats | None]) -> None:
        self._facts, self._stats = facts, stats

    def describe(self) -> list[Any]:
        """Nothing: registering asks no server."""
        return []

    def collect(self) -> Iterator[Any]:
        """The queue's and the engine's numbers now; those that cannot be read are left out."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        facts, stats = self._facts(), self._stats()
        yield GaugeMetricFamily("cua_queue_readable", "1 if the server said how the queue stands.", facts is not None)
        if facts is not None:
            yield GaugeMetricFamily("cua_queue_waiting_jobs", "Jobs that no worker has taken.", facts.waiting_jobs)
            yield GaugeMetricFamily("cua_queue_waiting_bytes", "Their payloads.", facts.waiting_bytes)
            yield GaugeMetricFamily(
                "cua_queue_oldest_waiting_seconds", "Age of the oldest; 0 if none.", facts.oldest_waiting_s or 0.0
            )
            yield GaugeMetricFamily("cua_queue_running_jobs", "Jobs in a worker's hand.", facts.running_jobs)
            workers = GaugeMetricFamily("cua_queue_workers", "Workers in each state.", labels=["state"])
            for state, count in facts.workers.items():
                workers.add_metric([state], count)
            yield workers
        if stats is not None:
            yield CounterMetricFamily("cua_image_cache_hits", "Screenshots known already.", stats.image_cache_hits)
            yield CounterMetricFamily("cua_image_cache_misses", "Screenshots that were new.", stats.image_cache_misses)
            yield GaugeMetricFamily("cua_image_cache_bytes", "Kept screenshots' states.", stats.image_cache_bytes)
            yield GaugeMetricFamily("cua_graphs", "CUDA graphs captured.", stats.graphs)
            yield GaugeMetricFamily("cua_gpu_allocated_bytes", "GPU memory in use.", stats.allocated_bytes)
            yield GaugeMetricFamily("cua_gpu_reserved_bytes", "GPU memory held.", stats.reserved_bytes)


def metrics_of(connection: redis.Redis, settings: Settings) -> NoMetrics:
    """The metrics that the settings ask for; `connection` says where the server is.

    Raises:
        SettingsError: as `Metrics`.
    """
    return Metrics(connection, settings) if settings.metrics_port else NoMetrics()
