"""What the router counts, in a registry of its own. Latencies come from timelines, gauges from state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdserve_router.answer import Answer
from pdserve_router.worker_client import WorkerClient
from pdserve_router.workers import Workers

_LATENCY_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_GAP_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class RouterMetrics:
    """Every request ends in exactly one ``outcome``: ok, disconnected, or an error's label."""

    def __init__(
        self, workers: Workers, *, num_running: Callable[[], int], num_waiting: Callable[[], int]
    ) -> None:
        registry = self._registry = CollectorRegistry()
        self._requests = Counter(
            "pdserve_requests", "Requests ended, by outcome", ["outcome"], registry=registry
        )
        self._prompt_tokens = Counter(
            "pdserve_prompt_tokens", "Prompt tokens of ended requests", registry=registry
        )
        self._cached_tokens = Counter(
            "pdserve_cached_tokens", "Of those, found in a prefix cache", registry=registry
        )
        self._output_tokens = Counter("pdserve_output_tokens", "Tokens sent to clients", registry=registry)
        self._retries = Counter("pdserve_retries", "Attempts that failed", registry=registry)
        self._fallbacks = Counter(
            "pdserve_fallbacks",
            "Attempts by decode alone although there are prefill workers",
            registry=registry,
        )
        self._handoffs = Counter(
            "pdserve_handoffs",
            "Hand-offs, by transport and whether sealed",
            ["transport", "sealed"],
            registry=registry,
        )
        self._handoff_bytes = Counter("pdserve_handoff_bytes", "KV moved", ["transport"], registry=registry)
        self._ttft = _histogram(
            "pdserve_ttft_seconds", "Request to first token", _LATENCY_BUCKETS_S, registry
        )
        self._gap = _histogram("pdserve_handoff_gap_seconds", "Token 1 to token 2", _GAP_BUCKETS_S, registry)
        self._itl = _histogram(
            "pdserve_itl_seconds", "Between tokens, from token 2 on", _GAP_BUCKETS_S, registry
        )
        self._queue = _histogram(
            "pdserve_queue_seconds", "Request to workers found", _LATENCY_BUCKETS_S, registry
        )
        registry.register(_StateCollector(workers, num_running, num_waiting))

    def refused(self, outcome: str) -> None:
        """A request that ended before it reached a worker."""
        self._requests.labels(outcome).inc()

    def ended(self, answer: Answer, outcome: str) -> None:
        self._requests.labels(outcome).inc()
        usage = answer.usage()
        self._prompt_tokens.inc(usage.num_prompt_tokens)
        self._cached_tokens.inc(usage.num_cached_tokens)
        self._output_tokens.inc(usage.num_output_tokens)
        for choice in answer.choices:
            timeline, progress = choice.request.timeline, choice.progress
            self._retries.inc(progress.num_failures)
            self._fallbacks.inc(progress.num_fallbacks)
            _observe(self._ttft, timeline.ttft_s)
            _observe(self._gap, timeline.handoff_gap_s)
            _observe(self._queue, timeline.queue_s)
            for itl_s in timeline.itls_s:
                self._itl.observe(itl_s)
            if progress.handoff is not None:
                report = progress.handoff
                self._handoffs.labels(report.transport, str(report.sealed).lower()).inc()
                self._handoff_bytes.labels(report.transport).inc(report.num_bytes)

    def render(self) -> bytes:
        return generate_latest(self._registry)


class _StateCollector(Collector):
    """Gauges read when they are asked for, so they cannot lag behind a mass cancel."""

    def __init__(
        self, workers: Workers, num_running: Callable[[], int], num_waiting: Callable[[], int]
    ) -> None:
        self._workers = workers
        self._num_running = num_running
        self._num_waiting = num_waiting

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("pdserve_requests_running", "Requests being served", self._num_running())
        yield GaugeMetricFamily("pdserve_requests_waiting", "Choices waiting for room", self._num_waiting())
        up = GaugeMetricFamily("pdserve_worker_ready", "1 when it takes requests", labels=["role", "worker"])
        blocks = GaugeMetricFamily("pdserve_worker_blocks", "KV blocks", labels=["role", "worker", "state"])
        sequences = GaugeMetricFamily(
            "pdserve_worker_sequences", "By state", labels=["role", "worker", "state"]
        )
        totals = GaugeMetricFamily(
            "pdserve_worker_total", "Totals since its start", labels=["role", "worker", "name"]
        )
        for role, client in _with_role(self._workers):
            up.add_metric([role, client.address], float(client.is_ready))
            if (status := client.status) is None:
                continue
            for state, count in (
                ("free", status.num_free_blocks - status.num_cached_blocks),
                ("cached", status.num_cached_blocks),
                ("owned", status.num_owned_blocks),
                ("quarantined", status.num_quarantined_blocks),
            ):
                blocks.add_metric([role, client.address, state], count)
            for state, count in (
                ("waiting", status.num_waiting),
                ("running", status.num_running),
                ("reserved", status.num_reserved),
            ):
                sequences.add_metric([role, client.address, state], count)
            for name, value in status.counters.items():
                totals.add_metric([role, client.address, name], value)
        yield from (up, blocks, sequences, totals)


def _with_role(workers: Workers) -> Iterable[tuple[str, WorkerClient]]:
    yield from (("prefill", client) for client in workers.prefill)
    yield from (("decode", client) for client in workers.decode)


def _histogram(name: str, text: str, buckets: tuple[float, ...], registry: CollectorRegistry) -> Histogram:
    return Histogram(name, text, buckets=buckets, registry=registry)


def _observe(histogram: Histogram, value: float | None) -> None:
    if value is not None:
        histogram.observe(value)
