"""What the router counts, in a registry of its own. Latencies come from timelines, gauges from state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdserve.rpc.status import blocks_by_state, sequences_by_state
from pdserve.rpc.v1 import worker_pb2 as pb
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
        self._retries = Counter(
            "pdserve_retries", "Attempts that failed, by why", ["reason"], registry=registry
        )
        self._fallbacks = Counter(
            "pdserve_fallbacks",
            "Attempts by decode alone although there are prefill workers",
            registry=registry,
        )
        self._handoffs = Counter(
            "pdserve_handoffs",
            "Hand-offs that prefill workers reported, by transport and whether sealed",
            ["transport", "sealed"],
            registry=registry,
        )
        self._handoff_bytes = Counter(
            "pdserve_handoff_bytes",
            "KV bytes that prefill workers report as moved",
            ["transport"],
            registry=registry,
        )
        self._transfer_seconds = Counter(
            "pdserve_handoff_transfer_seconds",
            "Time that prefill workers report for moving them",
            ["transport"],
            registry=registry,
        )
        self._hidden_seconds = Counter(
            "pdserve_handoff_hidden_seconds",
            "Of that, while the prompt was still being computed",
            ["transport"],
            registry=registry,
        )
        self._ttft = _histogram(
            "pdserve_ttft_seconds",
            "Request received to first token (TTFT), per choice",
            _LATENCY_BUCKETS_S,
            registry,
        )
        self._gap = _histogram(
            "pdserve_handoff_gap_seconds",
            "Token 1 to token 2 (hand-off gap), per choice",
            _GAP_BUCKETS_S,
            registry,
        )
        self._itl = _histogram(
            "pdserve_itl_seconds",
            "Between neighbouring tokens from token 2 on (ITL)",
            _GAP_BUCKETS_S,
            registry,
        )
        self._tpot = _histogram(
            "pdserve_tpot_seconds",
            "Mean time per token after the first (TPOT), per choice",
            _GAP_BUCKETS_S,
            registry,
        )
        self._duration = _histogram(
            "pdserve_request_seconds",
            "Request received to last token, per choice",
            _LATENCY_BUCKETS_S,
            registry,
        )
        self._queue = _histogram(
            "pdserve_queue_seconds",
            "Request received to workers found, per choice",
            _LATENCY_BUCKETS_S,
            registry,
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
            for label in progress.failure_labels:
                self._retries.labels(label).inc()
            self._fallbacks.inc(progress.num_fallbacks)
            _observe(self._ttft, timeline.ttft_s)
            _observe(self._gap, timeline.handoff_gap_s)
            _observe(self._queue, timeline.queue_s)
            _observe(self._tpot, timeline.tpot_s)
            _observe(self._duration, timeline.duration_s)
            for itl_s in timeline.itls_s:
                self._itl.observe(itl_s)
            for report in progress.handoffs:
                self._handed_off(report)

    def _handed_off(self, report: pb.HandoffReport) -> None:
        transport = report.transport or "none"
        self._handoffs.labels(transport, str(report.sealed).lower()).inc()
        self._handoff_bytes.labels(transport).inc(report.num_bytes)
        self._transfer_seconds.labels(transport).inc(report.transfer_ms / 1000)
        self._hidden_seconds.labels(transport).inc(report.hidden_transfer_ms / 1000)

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
        up = GaugeMetricFamily(
            "pdserve_worker_ready", "1 while the worker takes requests", labels=["role", "worker"]
        )
        blocks = GaugeMetricFamily(
            "pdserve_worker_blocks",
            "KV blocks as the worker last reported them, by state",
            labels=["role", "worker", "state"],
        )
        sequences = GaugeMetricFamily(
            "pdserve_worker_sequences",
            "Sequences as the worker last reported them, by state",
            labels=["role", "worker", "state"],
        )
        totals = CounterMetricFamily(
            "pdserve_worker_counters",
            "Other totals as the worker last reported them",
            labels=["role", "worker", "name"],
        )
        for role, client in _with_role(self._workers):
            up.add_metric([role, client.address], float(client.is_ready))
            if (status := client.status) is None:
                continue
            for state, count in blocks_by_state(status).items():
                blocks.add_metric([role, client.address, state], count)
            for state, count in sequences_by_state(status).items():
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
