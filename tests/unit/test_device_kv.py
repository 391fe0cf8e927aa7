"""The device's view of a pool, on a CPU: the same code without streams."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdserve.kvcache.device import DeviceKV
from pdserve.kvcache.layout import DTYPE_BYTES, KVLayout, PoolOrder
from pdserve.kvcache.segment import Segment, WireOrder
from pdserve.kvcache.storage import KVStorage

NUM_BLOCKS = 12


def storage_of(layout: KVLayout, seed: int) -> KVStorage:
    storage = KVStorage(layout, num_blocks=NUM_BLOCKS)
    generator = torch.Generator().manual_seed(seed)
    for pool in [*storage.k, *storage.v]:
        pool.view(torch.uint8).random_(0, 256, generator=generator)
    return storage


@st.composite
def cases(draw: st.DrawFn) -> tuple[KVLayout, Segment, list[int], WireOrder]:
    layout = KVLayout(
        num_layers=draw(st.integers(1, 3)),
        num_kv_heads=draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from([2, 3, 8])),
        dtype=draw(st.sampled_from(sorted(DTYPE_BYTES))),
        block_size=draw(st.integers(1, 5)),
        order=draw(st.sampled_from(PoolOrder)),
    )
    wire_order = draw(st.sampled_from(WireOrder))
    block_table = draw(st.permutations(range(1, NUM_BLOCKS)))[:5]
    most = len(block_table) * layout.block_size
    begin = draw(st.integers(0, most - 1))
    head_begin = draw(st.integers(0, layout.num_kv_heads - 1))
    num_heads = draw(st.integers(1, layout.num_kv_heads - head_begin))
    if wire_order is WireOrder.BLOCK:
        begin -= begin % layout.block_size
        head_begin, num_heads = 0, layout.num_kv_heads
    layer = draw(st.integers(0, layout.num_layers - 1))
    num_layers = draw(st.integers(1, layout.num_layers - layer))
    num_tokens = draw(st.integers(1, most - begin))
    return (
        layout,
        Segment(layer, num_layers, head_begin, num_heads, begin, num_tokens),
        block_table,
        wire_order,
    )


def raw(storage: KVStorage) -> list[bytes]:
    return [bytes(pool.view(-1).view(torch.uint8).numpy().data) for pool in [*storage.k, *storage.v]]


@given(cases())
def test_what_is_gathered_is_what_a_stream_would_carry(
    case: tuple[KVLayout, Segment, list[int], WireOrder],
) -> None:
    layout, segment, block_table, wire_order = case
    storage = storage_of(layout, 1)
    kv = DeviceKV(storage)
    expected = streamed(storage, segment, block_table, wire_order)
    buffer = kv.new_buffer(len(expected) + 5)
    lane = kv.new_lane()
    lane.gather(segment, block_table, wire_order, buffer)
    assert lane.mark()()
    assert bytes(buffer.head(len(expected)).numpy().data) == expected
    assert streamed(kv, segment, block_table, wire_order) == expected


@given(cases())
def test_what_is_scattered_lies_where_a_stream_would_put_it_and_nowhere_else(
    case: tuple[KVLayout, Segment, list[int], WireOrder],
) -> None:
    layout, segment, block_table, wire_order = case
    num_bytes = segment.payload_bytes(layout, wire_order)
    payload = bytearray(random.Random(7).randbytes(num_bytes))
    by_stream, by_lane, by_host = (storage_of(layout, 2) for _ in range(3))
    fill(by_stream, segment, block_table, wire_order, payload=payload)

    kv = DeviceKV(by_lane)
    buffer = kv.new_buffer(num_bytes)
    buffer.head(num_bytes).copy_(torch.frombuffer(payload, dtype=torch.uint8))
    kv.new_lane().scatter(segment, block_table, wire_order, buffer)
    assert raw(by_lane) == raw(by_stream)

    fill(DeviceKV(by_host), segment, block_table, wire_order, payload=payload)
    assert raw(by_host) == raw(by_stream)


def streamed(
    kv: KVStorage | DeviceKV, segment: Segment, block_table: list[int], wire_order: WireOrder
) -> bytes:
    content = bytearray(segment.payload_bytes(kv.layout, wire_order))
    kv.outgoing(segment, block_table, wire_order).gather(0, memoryview(content))
    return bytes(content)


def fill(
    kv: KVStorage | DeviceKV,
    segment: Segment,
    block_table: list[int],
    wire_order: WireOrder,
    *,
    payload: bytearray,
) -> None:
    target = kv.incoming(segment, block_table, wire_order)
    target.payload.scatter(0, memoryview(payload))
    target.finish()


@pytest.mark.parametrize("num_bytes", [1, 7, 8, 9, 64, 1001])
def test_the_checksum_finds_every_changed_and_every_moved_byte(num_bytes: int) -> None:
    kv = DeviceKV(storage_of(KVLayout(1, 1, 2, "float32", 1, PoolOrder.HEAD_MAJOR), 3))
    lane, buffer = kv.new_lane(), kv.new_buffer(num_bytes)
    content = buffer.head(num_bytes)
    content.copy_(torch.arange(num_bytes, dtype=torch.int64).to(torch.uint8))
    seen = {lane.checksum(buffer, num_bytes)()}
    for position in range(num_bytes):
        content[position] ^= 0x80
        seen.add(lane.checksum(buffer, num_bytes)())
        content[position] ^= 0x80
    if num_bytes > 16:
        content.copy_(content.roll(8))
        seen.add(lane.checksum(buffer, num_bytes)())
    assert len(seen) == 1 + num_bytes + (num_bytes > 16), "two of them have the same checksum"
    assert all(0 <= value < 2**64 for value in seen)


def test_the_checksum_finds_the_same_bit_wrong_in_two_words() -> None:
    kv = DeviceKV(storage_of(KVLayout(1, 1, 2, "float32", 1, PoolOrder.HEAD_MAJOR), 3))
    lane, buffer = kv.new_lane(), kv.new_buffer(64)
    words = buffer.content.view(torch.int64)
    words.copy_(torch.arange(8))
    before = lane.checksum(buffer, 64)()
    for bit in range(64):
        flip = torch.tensor(1 << bit if bit < 63 else -(1 << 63))
        words[[2, 5]] ^= flip
        assert lane.checksum(buffer, 64)() != before
        words[[2, 5]] ^= flip


def test_bytes_behind_the_payload_do_not_count() -> None:
    kv = DeviceKV(storage_of(KVLayout(1, 1, 2, "float32", 1, PoolOrder.HEAD_MAJOR), 3))
    lane, buffer = kv.new_lane(), kv.new_buffer(24)
    buffer.content.fill_(1)
    before = lane.checksum(buffer, 13)()
    buffer.content[13:].fill_(9)
    assert lane.checksum(buffer, 13)() == before


def test_a_lane_copies_between_buffers() -> None:
    kv = DeviceKV(storage_of(KVLayout(1, 1, 2, "float32", 1, PoolOrder.HEAD_MAJOR), 3))
    lane, source, target = kv.new_lane(), kv.new_buffer(16), kv.new_buffer(16)
    source.content.copy_(torch.arange(16))
    target.content.zero_()
    lane.copy(source, target, 10)
    assert target.content.tolist() == [*range(10), *[0] * 6]
