"""Which ways between GPUs a worker offers, and what it shows of them."""

from prometheus_client import CollectorRegistry

from pdserve.clock import MonotonicClock
from pdserve.kvcache.layout import KVLayout, PoolOrder
from pdserve.kvcache.storage import KVStorage
from pdserve.transfer.cuda_ipc.exports import IpcExports
from pdserve.transfer.cuda_ipc.host import own_identity
from pdserve.transfer.nccl.pair import NcclPairs
from pdserve.worker.gpu_ways import IpcCollector, NcclCollector, gpu_ways, way_by_ipc, way_by_nccl
from tests.support.exposition import documented
from tests.support.fake_device import FakeDevice, FakeDeviceKV
from tests.support.fake_ipc import FakeIpcHost, FakeIpcMemory
from tests.support.fake_nccl import FakeFabric, FakeNccl

LAYOUT = KVLayout(1, 1, 8, "float32", 4, PoolOrder.HEAD_MAJOR)


def test_a_pool_in_the_hosts_memory_has_none() -> None:
    storage = KVStorage(LAYOUT, num_blocks=2)
    ways = gpu_ways(storage, MonotonicClock())
    assert ways.kv is storage
    assert not ways.senders
    assert not ways.receivers
    assert not ways.collectors


def test_the_metrics_of_both_are_those_of_the_table() -> None:
    device, clock = FakeDevice(), MonotonicClock()
    kv = FakeDeviceKV(KVStorage(LAYOUT, num_blocks=2), device)
    ways = [
        way_by_ipc(FakeIpcMemory(FakeIpcHost()), kv, clock),
        way_by_nccl(FakeNccl(FakeFabric(), device, "2.30.3"), kv, clock),
    ]
    assert [way.name for way in ways] == ["cuda-ipc", "nccl"]
    registry = CollectorRegistry()
    for way in ways:
        registry.register(way.collector)
    assert {family.name: family.documentation for family in registry.collect()} == {
        name: row.meaning for name, row in documented("Workers with GPUs").items()
    }


def test_the_numbers_are_those_of_the_books() -> None:
    device = FakeDevice()
    kv = FakeDeviceKV(KVStorage(LAYOUT, num_blocks=2), device)
    pairs = NcclPairs(FakeNccl(FakeFabric(), device, "2.30.3"), kv, MonotonicClock())
    pairs.unique_id()
    exports = IpcExports(FakeIpcMemory(FakeIpcHost()))
    exports.retire(exports.new(8, pid=own_identity().pid), lambda: True)
    families = [*NcclCollector(pairs).collect(), *IpcCollector(exports).collect()]
    assert {family.name: family.samples[0].value for family in families} == {
        "pdserve_nccl_pairs": 0,
        "pdserve_nccl_stuck_aborts": 0,
        "pdserve_nccl_unjoined_ids": 1,
        "pdserve_cuda_ipc_retired_buffers": 1,
    }
