"""What both kinds of worker show to Prometheus, and the server that shows it.

Nothing is counted here twice: totals and states are read when they are asked for, from the
worker's status and from the ledgers of whoever ends things. The table of all metrics is
docs/metrics.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdserve.errors import ConfigError
from pdserve.rpc.status import blocks_by_state, sequences_by_state
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.worker.directory import RequestDirectory

logger = logging.getLogger(__name__)

# Totals of ``WorkerStatus.counters`` that both kinds have, and what each counts.
_TOTALS = {
    "steps": "Model executions",
    "preemptions": "Sequences whose blocks were taken to be computed again later",
    "computed_tokens": "Tokens whose KV was computed here",
    "cached_tokens": "Prompt tokens whose KV was here already",
    "generated_tokens": "Tokens sampled here",
}


class WorkerMetrics:
    """A registry of its own; ``status`` may be called from the thread that serves it."""

    def __init__(self, status: Callable[[], pb.WorkerStatus], directory: RequestDirectory) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_StatusCollector(status))
        self._registry.register(_RequestCollector(directory))

    def register(self, collector: Collector) -> None:
        """Adds what only one kind of worker has."""
        self._registry.register(collector)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def serve(self, host: str, port: int) -> tuple[WSGIServer, Thread]:
        """HTTP on a thread of its own: a scrape never waits for the event loop, nor it for a scrape.

        Raises ``ConfigError`` when the port cannot be had.
        """
        try:
            return start_http_server(port, addr=host, registry=self._registry)
        except OSError as error:
            raise ConfigError(f"cannot show metrics on {host}:{port}: {error.strerror}") from error


@contextmanager
def shown(metrics: WorkerMetrics, host: str, port: int | None) -> Iterator[None]:
    """Over HTTP for the length of the block; nowhere when ``port`` is None. Raises as ``serve`` does."""
    if port is None:
        yield
        return
    server, thread = metrics.serve(host, port)
    logger.info("metrics address=%s:%d", host, server.server_port)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _StatusCollector(Collector):
    def __init__(self, status: Callable[[], pb.WorkerStatus]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        yield _info(status.identity)
        yield gauges("pdserve_kv_blocks", "KV blocks, by state", "state", blocks_by_state(status))
        yield gauges(
            "pdserve_sequences",
            "Sequences in the engine, by state; reserved: hand-offs under way",
            "state",
            sequences_by_state(status),
        )
        yield GaugeMetricFamily(
            "pdserve_waiting_prefill_tokens",
            "Prompt tokens accepted and not computed yet",
            status.num_waiting_prefill_tokens,
        )
        yield GaugeMetricFamily(
            "pdserve_last_step_age_seconds",
            "Since the engine showed a sign of life; 0 while it has nothing to do",
            status.last_step_age_s,
        )
        yield GaugeMetricFamily("pdserve_draining", "1 while new requests are refused", status.draining)
        for name, text in _TOTALS.items():
            yield CounterMetricFamily(f"pdserve_engine_{name}", text, status.counters[name])


class _RequestCollector(Collector):
    def __init__(self, directory: RequestDirectory) -> None:
        self._directory = directory

    def collect(self) -> Iterator[Metric]:
        requests = self._directory.requests
        yield CounterMetricFamily("pdserve_worker_requests", "Requests taken on", requests.num_begun)
        yield counters(
            "pdserve_worker_requests_ended", "Requests that ended here, by how", "outcome", requests.ended
        )
        yield counters(
            "pdserve_worker_refusals",
            "Times a router was told: not now",
            "reason",
            self._directory.refusals,
        )


def gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for value_label, value in values.items():
        family.add_metric([value_label], value)
    return family


def counters(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for value_label, value in values.items():
        family.add_metric([value_label], value)
    return family


def _info(identity: pb.WorkerIdentity) -> Metric:
    family = GaugeMetricFamily(
        "pdserve_worker_info", "Always 1; says what this worker is", labels=["role", "model", "version"]
    )
    role = pb.WorkerRole.Name(identity.role).removeprefix("WORKER_ROLE_").lower()
    family.add_metric([role, identity.model_name, identity.version], 1)
    return family
