"""The ways for KV between GPUs that this worker has: none on a CPU. Never run on a GPU yet."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdserve.clock import Clock
from pdserve.kvcache.device import DeviceKV
from pdserve.kvcache.segment import KVBytes
from pdserve.kvcache.storage import KVStorage
from pdserve.transfer.nccl import nccl4py
from pdserve.transfer.nccl import payloads as nccl
from pdserve.transfer.nccl.pair import NcclPairs
from pdserve.transfer.payload import ReceiverOpeners, SenderOpeners

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GpuWays:
    """``kv``: the pool for links of any transport. The others are empty where there is no GPU."""

    kv: KVBytes
    senders: SenderOpeners = field(default_factory=dict)
    receivers: ReceiverOpeners = field(default_factory=dict)
    collectors: tuple[Collector, ...] = ()


def gpu_ways(storage: KVStorage, clock: Clock) -> GpuWays:
    if storage.k[0].device.type != "cuda":
        return GpuWays(storage)
    kv = DeviceKV(storage)
    try:
        library = nccl4py.load()
    except nccl4py.NcclUnavailable as error:
        logger.warning("nccl_unavailable detail=%s", error)
        return GpuWays(kv)
    return ways_by_nccl(kv, NcclPairs(library, kv, clock), clock)


def ways_by_nccl(kv: KVBytes, pairs: NcclPairs, clock: Clock) -> GpuWays:
    return GpuWays(
        kv,
        senders={nccl.NAME: partial(nccl.open_sender, pairs, clock)},
        receivers={nccl.NAME: partial(nccl.open_receiver, pairs, clock)},
        collectors=(NcclCollector(pairs),),
    )


class NcclCollector(Collector):
    def __init__(self, pairs: NcclPairs) -> None:
        self._pairs = pairs

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("pdserve_nccl_pairs", "Communicators that hold memory", self._pairs.num_open)
        yield GaugeMetricFamily(
            "pdserve_nccl_stuck_aborts", "Communicators whose abort hangs", self._pairs.num_stuck
        )
        yield GaugeMetricFamily(
            "pdserve_nccl_unjoined_ids", "Unique ids that no peer has come to", self._pairs.num_unjoined_ids
        )
