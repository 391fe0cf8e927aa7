"""Lanes on a GPU do what lanes on a CPU do. Never run on hardware yet."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from pdserve.clock import MonotonicClock
from pdserve.kvcache.device import DeviceKV, TorchBuffer, TorchLane
from pdserve.kvcache.layout import DTYPE_BYTES, KVLayout, PoolOrder
from pdserve.kvcache.segment import Segment, WireOrder
from pdserve.kvcache.storage import KVStorage
from pdserve.transfer.device.wait import wait_until

pytestmark = pytest.mark.gpu
BLOCK_TABLE = (9, 3, 4, 11)
SEGMENT = Segment(1, 2, 0, 2, 16, 37)


@dataclass
class End:
    storage: KVStorage
    kv: DeviceKV
    lane: TorchLane
    buffer: TorchBuffer

    def finish(self) -> None:
        wait_until(self.lane.mark(), MonotonicClock(), what="the lane")

    def raw(self) -> list[torch.Tensor]:
        return [pool.view(torch.uint8).cpu() for pool in (*self.storage.k, *self.storage.v)]


def end(layout: KVLayout, device: str, wire_order: WireOrder) -> End:
    storage = KVStorage(layout, num_blocks=16, device=device)
    generator = torch.Generator().manual_seed(3)
    for pool in (*storage.k, *storage.v):
        content = torch.randint(0, 256, pool.view(torch.uint8).shape, dtype=torch.uint8, generator=generator)
        pool.view(torch.uint8).copy_(content)
    kv = DeviceKV(storage)
    kv.use_device()
    return End(storage, kv, kv.new_lane(), kv.new_buffer(SEGMENT.payload_bytes(layout, wire_order)))


@pytest.mark.parametrize("wire_order", list(WireOrder))
@pytest.mark.parametrize("order", list(PoolOrder))
@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
def test_gather_checksum_and_scatter_are_those_of_the_cpu(
    dtype: str, order: PoolOrder, wire_order: WireOrder
) -> None:
    layout = KVLayout(3, 2, 16, dtype, 16, order)
    ends = [end(layout, device, wire_order) for device in ("cpu", "cuda")]
    num_bytes = SEGMENT.payload_bytes(layout, wire_order)
    checksums = []
    for each in ends:
        each.lane.gather(SEGMENT, BLOCK_TABLE, wire_order, each.buffer)
        checksums.append(each.lane.checksum(each.buffer, num_bytes))
        each.finish()
    on_cpu, on_gpu = ends
    assert torch.equal(on_gpu.buffer.head(num_bytes).cpu(), on_cpu.buffer.head(num_bytes))
    assert checksums[0]() == checksums[1]()
    for each in ends:
        each.lane.scatter(SEGMENT, tuple(reversed(BLOCK_TABLE)), wire_order, each.buffer)
        each.finish()
    assert all(map(torch.equal, on_gpu.raw(), on_cpu.raw()))


def test_a_gather_waits_for_what_the_engine_has_enqueued() -> None:
    layout = KVLayout(3, 2, 16, "float32", 16, PoolOrder.TOKEN_MAJOR)
    subject = end(layout, "cuda", WireOrder.BLOCK)
    torch.cuda._sleep(200_000_000)  # about 0.1 s, on the default stream, as the engine's work
    for pool in (*subject.storage.k, *subject.storage.v):
        pool.fill_(5.0)
    subject.lane.gather(SEGMENT, BLOCK_TABLE, WireOrder.BLOCK, subject.buffer)
    assert not subject.lane.mark()()
    subject.finish()
    num_bytes = SEGMENT.payload_bytes(layout, WireOrder.BLOCK)
    assert (subject.buffer.head(num_bytes).view(torch.float32) == 5.0).all()
