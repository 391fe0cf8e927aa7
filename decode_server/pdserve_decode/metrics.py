"""What only a decode worker shows: its reservations and the KV that lands in them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from pdserve.transfer.landing import LandingTable
from pdserve.worker.ledger import Ledger
from pdserve.worker.metrics import counters


class LandingCollector(Collector):
    def __init__(self, reservations: Ledger, landing: LandingTable) -> None:
        self._reservations = reservations
        self._landing = landing

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "pdserve_reservations", "Reservations granted", self._reservations.num_begun
        )
        yield counters(
            "pdserve_reservations_ended",
            "Reservations that ended, by how",
            "outcome",
            self._reservations.ended,
        )
        yield CounterMetricFamily(
            "pdserve_kv_landed_bytes",
            "KV bytes that arrived with the right checksum",
            self._landing.num_bytes,
        )
        yield counters(
            "pdserve_kv_dropped_frames", "Frames read and not placed", "reason", self._landing.dropped()
        )
