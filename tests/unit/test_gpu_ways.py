"""Which ways between GPUs a worker offers, and what it shows of them."""

from prometheus_client import CollectorRegistry

from pdserve.clock import MonotonicClock
from pdserve.kvcache.layout import KVLayout, PoolOrder
from pdserve.kvcache.storage import KVStorage
from pdserve.transfer.nccl.pair import NcclPairs
from pdserve.worker.gpu_ways import gpu_ways, ways_by_nccl
from tests.support.exposition import documented
from tests.support.fake_device import FakeDevice, FakeDeviceKV
from tests.support.fake_nccl import FakeFabric, FakeNccl

LAYOUT = KVLayout(1, 1, 8, "float32", 4, PoolOrder.HEAD_MAJOR)


def test_a_pool_in_the_hosts_memory_has_none() -> None:
    storage = KVStorage(LAYOUT, num_blocks=2)
    ways = gpu_ways(storage, MonotonicClock())
    assert ways.kv is storage
    assert not ways.senders
    assert not ways.receivers
    assert not ways.collectors


def test_with_nccl_both_ends_have_it_and_its_metrics_are_those_of_the_table() -> None:
    storage, device, clock = KVStorage(LAYOUT, num_blocks=2), FakeDevice(), MonotonicClock()
    library = FakeNccl(FakeFabric(), device, "2.30.3")
    pairs = NcclPairs(library, FakeDeviceKV(storage, device), clock)
    ways = ways_by_nccl(storage, pairs, clock)
    assert set(ways.senders) == set(ways.receivers) == {"nccl"}
    pairs.unique_id()
    registry = CollectorRegistry()
    for collector in ways.collectors:
        registry.register(collector)
    shown = {family.name: family for family in registry.collect()}
    assert {name: family.documentation for name, family in shown.items()} == {
        name: row.meaning for name, row in documented("Workers with NCCL").items()
    }
    assert shown["pdserve_nccl_unjoined_ids"].samples[0].value == 1
