"""The ways for KV between GPUs that this worker has: none on a CPU. Never run on a GPU yet."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdserve.clock import Clock
from pdserve.kvcache import cuda_ipc
from pdserve.kvcache.device import DeviceKV
from pdserve.kvcache.segment import KVBytes
from pdserve.kvcache.storage import KVStorage
from pdserve.transfer.cuda_ipc import payloads as ipc
from pdserve.transfer.cuda_ipc.exports import IpcExports
from pdserve.transfer.cuda_ipc.host import own_identity
from pdserve.transfer.cuda_ipc.mappings import IpcMappings
from pdserve.transfer.cuda_ipc.memory import IpcMemory
from pdserve.transfer.device import memory
from pdserve.transfer.nccl import nccl4py
from pdserve.transfer.nccl import payloads as nccl
from pdserve.transfer.nccl.library import NcclLibrary
from pdserve.transfer.nccl.pair import NcclPairs
from pdserve.transfer.payload import OpenReceiver, OpenSender, ReceiverOpeners, SenderOpeners

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GpuWays:
    """``kv``: the pool for links of any transport. The others are empty where there is no GPU."""

    kv: KVBytes
    senders: SenderOpeners = field(default_factory=dict)
    receivers: ReceiverOpeners = field(default_factory=dict)
    collectors: Sequence[Collector] = ()


@dataclass(frozen=True, slots=True)
class Way:
    name: str
    open_sender: OpenSender
    open_receiver: OpenReceiver
    collector: Collector


def gpu_ways(storage: KVStorage, clock: Clock) -> GpuWays:
    if storage.k[0].device.type != "cuda":
        return GpuWays(storage)
    kv = DeviceKV(storage)
    ways = []
    try:
        ways.append(way_by_ipc(cuda_ipc.load(), kv, clock))
    except cuda_ipc.IpcUnavailable as error:
        logger.warning("cuda_ipc_unavailable detail=%s", error)
    try:
        ways.append(way_by_nccl(nccl4py.load(), kv, clock))
    except nccl4py.NcclUnavailable as error:
        logger.warning("nccl_unavailable detail=%s", error)
    return GpuWays(
        kv,
        senders={way.name: way.open_sender for way in ways},
        receivers={way.name: way.open_receiver for way in ways},
        collectors=[way.collector for way in ways],
    )


def way_by_nccl(library: NcclLibrary, kv: memory.DeviceKV, clock: Clock) -> Way:
    pairs = NcclPairs(library, kv, clock)
    return Way(
        nccl.NAME,
        partial(nccl.open_sender, pairs, clock),
        partial(nccl.open_receiver, pairs, clock),
        NcclCollector(pairs),
    )


def way_by_ipc(shared: IpcMemory, kv: memory.DeviceKV, clock: Clock) -> Way:
    identity = own_identity()
    exports = IpcExports(shared)
    decode = ipc.IpcDecode(exports, kv, identity, clock)
    mappings = IpcMappings(shared, kv, clock)
    return Way(
        ipc.NAME,
        partial(ipc.open_sender, mappings, identity, clock),
        decode.open_receiver,
        IpcCollector(exports),
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


class IpcCollector(Collector):
    def __init__(self, exports: IpcExports) -> None:
        self._exports = exports

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "pdserve_cuda_ipc_retired_buffers",
            "Staging buffers of ended links that a peer may still have mapped",
            self._exports.num_retired,
        )
