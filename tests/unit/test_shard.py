"""Simulated ranks: whatever the cut on either side, decode's pools hold what prefill's pools held."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.kvcache.layout import KVLayout, PoolOrder
from pdserve.kvcache.segment import Segment, WireOrder
from pdserve.kvcache.shard import Shard, deliveries, shards
from pdserve.transfer.coverage import Coverage
from tests.support.fake_kv import NumpyKV

NUM_BLOCKS = 40


@st.composite
def cuts(draw: st.DrawFn, num_layers: int, num_kv_heads: int) -> list[Shard]:
    ranks = draw(st.sampled_from([n for n in range(1, 9) if num_kv_heads % n == 0 or n % num_kv_heads == 0]))
    return shards(num_layers, num_kv_heads, stages=draw(st.integers(1, num_layers)), ranks=ranks)


def pool_of(shard: Shard, layout: KVLayout, block_size: int, order: PoolOrder) -> NumpyKV:
    own = replace(
        layout,
        num_layers=shard.num_layers,
        num_kv_heads=shard.num_heads,
        block_size=block_size,
        order=order,
    )
    return NumpyKV(own, NUM_BLOCKS)


def fill(kv: NumpyKV, shard: Shard, whole: np.ndarray, table: list[int]) -> None:
    """``whole``: [layers, {K, V}, tokens, heads, dim]: the KV of the model as one worker would have it."""
    layers = whole[shard.layer_begin : shard.layer_begin + shard.num_layers]
    mine = layers[:, :, :, shard.head_begin : shard.head_begin + shard.num_heads]
    everything = Segment(0, shard.num_layers, 0, shard.num_heads, 0, whole.shape[2])
    landing = kv.incoming(everything, table, WireOrder.TOKEN)
    landing.payload.scatter(0, memoryview(bytearray(mine.tobytes())))
    landing.finish()


@settings(max_examples=150, deadline=None)
@given(data=st.data(), num_layers=st.integers(1, 5), num_kv_heads=st.sampled_from([1, 2, 3, 4, 8]))
def test_any_two_cuts_of_a_model_exchange_its_kv(
    data: st.DataObject, num_layers: int, num_kv_heads: int
) -> None:
    sources, targets = (data.draw(cuts(num_layers, num_kv_heads)) for _ in range(2))
    num_tokens = data.draw(st.integers(1, 12))
    num_cached = data.draw(st.integers(0, num_tokens))
    layout = KVLayout(num_layers, num_kv_heads, 2, "float32", 4, PoolOrder.HEAD_MAJOR)
    whole = np.random.default_rng(1).standard_normal((num_layers, 2, num_tokens, num_kv_heads, 2), np.float32)
    tables = [data.draw(st.permutations(range(1, NUM_BLOCKS)))[:12] for _ in range(2)]
    sizes = [data.draw(st.integers(1, 5)) for _ in range(2)]
    orders = [data.draw(st.sampled_from(PoolOrder)) for _ in range(2)]
    prefill = [pool_of(shard, layout, sizes[0], orders[0]) for shard in sources]
    for kv, shard in zip(prefill, sources, strict=True):
        fill(kv, shard, whole, tables[0])
    for target in targets:
        decode, expected = (pool_of(target, layout, sizes[1], orders[1]) for _ in range(2))
        fill(expected, target, whole, tables[1])
        owed = Segment(0, target.num_layers, 0, target.num_heads, num_cached, num_tokens - num_cached)
        coverage = Coverage(owed)
        sent = deliveries(sources, target, token_begin=num_cached, num_tokens=num_tokens - num_cached)
        for index, segment in sent:
            source = prefill[index].outgoing(sources[index].local(segment), tables[0], WireOrder.TOKEN)
            content = memoryview(bytearray(source.num_bytes))
            source.gather(0, content)
            coverage.add(target.local(segment))
            landing = decode.incoming(target.local(segment), tables[1], WireOrder.TOKEN)
            landing.payload.scatter(0, content)
            landing.finish()
        assert coverage.is_complete
        if num_cached < num_tokens:
            arrived, right = (kv.tokens(tables[1], num_cached, num_tokens) for kv in (decode, expected))
            assert np.array_equal(arrived, right)


def test_ranks_that_share_a_head_send_it_once() -> None:
    sources = shards(2, 2, stages=1, ranks=4)
    assert sources[0] == sources[1] == Shard(0, 2, 0, 1)
    (whole,) = shards(2, 2, stages=1, ranks=1)
    sent = deliveries(sources, whole, token_begin=0, num_tokens=3)
    assert [index for index, _ in sent] == [0, 2]


def test_every_layer_has_a_stage() -> None:
    cut = shards(7, 4, stages=3, ranks=2)
    assert [(shard.layer_begin, shard.num_layers) for shard in cut[::2]] == [(0, 2), (2, 2), (4, 3)]
