"""A KV pool in numpy: the transfer package's view of a worker, without torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pdserve.kvcache.layout import KVLayout, PoolOrder
from pdserve.kvcache.segment import Segment, WireDtype, WireOrder

Array = npt.NDArray[np.float32]


@dataclass
class NumpyLanding:
    views: list[memoryview]
    finish: Callable[[], None]


class NumpyKV:
    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        self.layout = layout
        heads, block, dim = layout.num_kv_heads, layout.block_size, layout.head_dim
        shape = (heads, block, dim) if layout.order is PoolOrder.HEAD_MAJOR else (block, heads, dim)
        self.pools: list[Array] = [
            np.zeros((num_blocks, *shape), dtype=np.float32) for _ in range(2 * layout.num_layers)
        ]

    def randomize(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for pool in self.pools:
            pool[:] = rng.standard_normal(pool.shape, dtype=np.float32)

    def tokens(self, block_table: Sequence[int], begin: int, end: int) -> Array:
        """[2 * layers, tokens, heads, dim]: what a request's KV is, whatever the layout."""
        segment = Segment(0, self.layout.num_layers, 0, self.layout.num_kv_heads, begin, end - begin)
        return np.stack([self._cells(pool, segment, block_table) for pool in self._pools(segment)])

    def read_views(
        self, segment: Segment, block_table: Sequence[int], wire_order: WireOrder
    ) -> list[memoryview]:
        if wire_order is WireOrder.BLOCK:
            return self._blocks(segment, block_table)
        return [_bytes(self._cells(pool, segment, block_table)) for pool in self._pools(segment)]

    def write_views(
        self, segment: Segment, block_table: Sequence[int], wire_order: WireOrder
    ) -> NumpyLanding:
        if wire_order is WireOrder.BLOCK:
            return NumpyLanding(self._blocks(segment, block_table), lambda: None)
        pools = self._pools(segment)
        staged = [self._cells(pool, segment, block_table) for pool in pools]

        def finish() -> None:
            for pool, content in zip(pools, staged, strict=True):
                for row, token in enumerate(range(segment.token_begin, segment.token_end)):
                    self._cell(pool, segment, block_table, token)[:] = content[row]

        return NumpyLanding([_bytes(content) for content in staged], finish)

    def read_converted(
        self, segment: Segment, block_table: Sequence[int], wire_dtype: WireDtype
    ) -> list[memoryview]:
        assert wire_dtype is WireDtype.FLOAT16, "numpy has no other"
        return [
            _bytes(self._cells(pool, segment, block_table).astype(np.float16))
            for pool in self._pools(segment)
        ]

    def write_converted(
        self, segment: Segment, block_table: Sequence[int], wire_dtype: WireDtype
    ) -> NumpyLanding:
        assert wire_dtype is WireDtype.FLOAT16, "numpy has no other"
        pools = self._pools(segment)
        staged = [self._cells(pool, segment, block_table).astype(np.float16) for pool in pools]

        def finish() -> None:
            for pool, content in zip(pools, staged, strict=True):
                for row, token in enumerate(range(segment.token_begin, segment.token_end)):
                    self._cell(pool, segment, block_table, token)[:] = content[row]

        return NumpyLanding([_bytes(content) for content in staged], finish)

    def _pools(self, segment: Segment) -> list[Array]:
        return self.pools[2 * segment.layer_begin : 2 * segment.layer_end]

    def _blocks(self, segment: Segment, block_table: Sequence[int]) -> list[memoryview]:
        first = segment.token_begin // self.layout.block_size
        last = self.layout.num_blocks_for(segment.token_end)
        return [_bytes(pool[block]) for pool in self._pools(segment) for block in block_table[first:last]]

    def _cells(self, pool: Array, segment: Segment, block_table: Sequence[int]) -> Array:
        tokens = range(segment.token_begin, segment.token_end)
        return np.stack([self._cell(pool, segment, block_table, token) for token in tokens])

    def _cell(self, pool: Array, segment: Segment, block_table: Sequence[int], token: int) -> Array:
        block, offset = block_table[token // self.layout.block_size], token % self.layout.block_size
        heads = slice(segment.head_begin, segment.head_begin + segment.num_heads)
        if self.layout.order is PoolOrder.HEAD_MAJOR:
            return pool[block, heads, offset]
        return pool[block, offset, heads]


def _bytes(array: Array | npt.NDArray[np.float16]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
