"""A pool's KV as another type: out of one pool, as bytes, into another."""

from collections.abc import Callable

import pytest
import torch

from pdserve.kvcache.device import DeviceKV
from pdserve.kvcache.layout import KVLayout, PoolOrder
from pdserve.kvcache.segment import KVBytes, Segment, WireDtype, WireOrder, wire_layout
from pdserve.kvcache.storage import KVStorage

SEGMENT = Segment(layer_begin=1, num_layers=2, head_begin=0, num_heads=3, token_begin=3, num_tokens=9)
# The largest relative error of rounding, against the largest element of a head.
ROUNDING = {
    WireDtype.FLOAT16: 1e-3,
    WireDtype.BFLOAT16: 5e-3,
    WireDtype.INT8: 0.5 / 127 + 1e-6,
    WireDtype.FLOAT8: 0.5 / 8,
}


def storage(block_size: int, order: PoolOrder, dtype: str = "float32") -> KVStorage:
    filled = KVStorage(KVLayout(3, 3, 16, dtype, block_size, order), num_blocks=20)
    for pool in (*filled.k, *filled.v):
        pool.copy_(torch.randn(pool.shape))
    return filled


@pytest.mark.parametrize("bytes_of", [lambda pool: pool, DeviceKV], ids=["host", "device"])
@pytest.mark.parametrize("wire_dtype", list(ROUNDING))
@pytest.mark.parametrize("source_order", list(PoolOrder))
@pytest.mark.parametrize("target_order", list(PoolOrder))
def test_it_arrives_rounded_as_the_type_rounds(
    bytes_of: Callable[[KVStorage], KVBytes],
    wire_dtype: WireDtype,
    source_order: PoolOrder,
    target_order: PoolOrder,
) -> None:
    source, target = storage(4, source_order), storage(5, target_order)
    source_table, target_table = (7, 2, 9), (11, 3, 4)
    outgoing = bytes_of(source).outgoing_converted(SEGMENT, source_table, wire_dtype)
    landing = bytes_of(target).incoming_converted(SEGMENT, target_table, wire_dtype)
    content = bytearray(SEGMENT.payload_bytes(wire_layout(source.layout, wire_dtype), WireOrder.TOKEN))
    assert outgoing.num_bytes == landing.payload.num_bytes == len(content)
    untouched = [pool.clone() for pool in (target.k[0], target.v[0])]
    outgoing.gather(0, memoryview(content))
    landing.payload.scatter(0, memoryview(content))
    landing.finish()
    for layer in (1, 2):
        sent = source.gather(layer, torch.tensor(source_table), 12)
        arrived = target.gather(layer, torch.tensor(target_table), 12)
        for exact, rounded in zip(sent, arrived, strict=True):
            error = (exact - rounded)[:, 3:].abs()
            assert (error <= ROUNDING[wire_dtype] * exact[:, 3:].abs().amax(-1, keepdim=True)).all()
            assert error.max() > 0
    assert all(torch.equal(*pair) for pair in zip(untouched, (target.k[0], target.v[0]), strict=True))


def test_int8_is_about_half_of_half_floats() -> None:
    layout = storage(4, PoolOrder.HEAD_MAJOR, "float16").layout
    wide = KVLayout(30, 3, 64, "float16", 16, PoolOrder.HEAD_MAJOR)
    assert wire_layout(wide, WireDtype.INT8).token_bytes / wide.token_bytes == pytest.approx(68 / 128)
    assert wire_layout(layout, WireDtype.SAME) is layout
