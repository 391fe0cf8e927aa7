"""What only a prefill worker shows: hand-offs, and what their transfers cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from pdserve.transfer.push import HandoffOutcome
from pdserve.worker.ledger import Ledger
from pdserve.worker.metrics import counters
from pdserve_prefill.handoffs import Handoff

NO_LINK = "none"
_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)


class TransferMetrics(Collector):
    def __init__(self, handoffs: Ledger) -> None:
        self._handoffs = handoffs
        self._bytes = _by_transport("pdserve_kv_sent_bytes", "KV bytes sent")
        self._seconds = _by_transport("pdserve_kv_transfer_seconds", "Time spent sending KV")
        self._hidden_seconds = _by_transport(
            "pdserve_kv_hidden_transfer_seconds", "Of that, while the prompt was still being computed"
        )
        self._queue = _histogram("pdserve_prefill_queue_seconds", "Request received to prompt begun")
        self._prefill = _histogram("pdserve_prefill_seconds", "Prompt begun to first token")

    def handed_off(self, outcome: HandoffOutcome, handoff: Handoff) -> None:
        transport = outcome.transport or NO_LINK
        self._bytes.labels(transport).inc(outcome.num_bytes)
        self._seconds.labels(transport).inc(outcome.transfer_s)
        self._hidden_seconds.labels(transport).inc(outcome.hidden_transfer_s)
        self._queue.observe(handoff.started_s - handoff.received_s)
        if handoff.first_token_s:
            self._prefill.observe(handoff.first_token_s - handoff.started_s)

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily("pdserve_prefill_handoffs", "Hand-offs begun", self._handoffs.num_begun)
        yield counters(
            "pdserve_prefill_handoffs_ended", "Hand-offs that ended, by how", "outcome", self._handoffs.ended
        )
        yield from chain.from_iterable(metric.collect() for metric in self._own())

    def _own(self) -> Iterable[Counter | Histogram]:
        return (self._bytes, self._seconds, self._hidden_seconds, self._queue, self._prefill)


def _by_transport(name: str, text: str) -> Counter:
    return Counter(name, text, ["transport"], registry=None)


def _histogram(name: str, text: str) -> Histogram:
    return Histogram(name, text, buckets=_BUCKETS_S, registry=None)
