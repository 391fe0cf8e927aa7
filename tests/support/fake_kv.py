"""A KV pool in numpy: the transfer package's view of a worker, without torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pdserve.kvcache.layout import KVLayout, PoolOrder
from pdserve.kvcache.pieces import Pieces
from pdserve.kvcache.segment import Segment, WireDtype, WireOrder
from pdserve.kvcache.shared_memory import SharedMemory

Array = npt.NDArray[np.float32]


@dataclass
class NumpyLanding:
    payload: Pieces
    finish: Callable[[], None]


class NumpyKV:
    def __init__(self, layout: KVLayout, num_blocks: int, *, is_shared: bool = False) -> None:
        self.layout = layout
        heads, block, dim = layout.num_kv_heads, layout.block_size, layout.head_dim
        shape = (heads, block, dim) if layout.order is PoolOrder.HEAD_MAJOR else (block, heads, dim)
        pool_bytes = num_blocks * heads * block * dim * 4
        memory = SharedMemory.create(2 * layout.num_layers * pool_bytes)
        self.shared_memory = memory if is_shared else None
        whole = np.frombuffer(memory.content, np.float32)
        self.pools: list[Array] = list(whole.reshape(2 * layout.num_layers, num_blocks, *shape))

    def randomize(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for pool in self.pools:
            pool[:] = rng.standard_normal(pool.shape, dtype=np.float32)

    def tokens(self, block_table: Sequence[int], begin: int, end: int) -> Array:
        """[2 * layers, tokens, heads, dim]: what a request's KV is, whatever the layout."""
        segment = Segment(0, self.layout.num_layers, 0, self.layout.num_kv_heads, begin, end - begin)
        return np.stack([self._cells(pool, segment, block_table) for pool in self._pools(segment)])

    def outgoing(self, segment: Segment, block_table: Sequence[int], wire_order: WireOrder) -> Pieces:
        if wire_order is WireOrder.BLOCK:
            return self._blocks(segment, block_table)
        return Pieces.of_arrays(
            [_bytes(self._cells(pool, segment, block_table)) for pool in self._pools(segment)]
        )

    def incoming(self, segment: Segment, block_table: Sequence[int], wire_order: WireOrder) -> NumpyLanding:
        if wire_order is WireOrder.BLOCK:
            return NumpyLanding(self._blocks(segment, block_table), lambda: None)
        pools = self._pools(segment)
        staged = [self._cells(pool, segment, block_table) for pool in pools]

        def finish() -> None:
            for pool, content in zip(pools, staged, strict=True):
                for row, token in enumerate(range(segment.token_begin, segment.token_end)):
                    self._cell(pool, segment, block_table, token)[:] = content[row]

        return NumpyLanding(Pieces.of_arrays([_bytes(content) for content in staged]), finish)

    def outgoing_converted(
        self, segment: Segment, block_table: Sequence[int], wire_dtype: WireDtype
    ) -> Pieces:
        assert wire_dtype is WireDtype.FLOAT16, "numpy has no other"
        return Pieces.of_arrays(
            [
                _bytes(self._cells(pool, segment, block_table).astype(np.float16))
                for pool in self._pools(segment)
            ]
        )

    def incoming_converted(
        self, segment: Segment, block_table: Sequence[int], wire_dtype: WireDtype
    ) -> NumpyLanding:
        assert wire_dtype is WireDtype.FLOAT16, "numpy has no other"
        pools = self._pools(segment)
        staged = [self._cells(pool, segment, block_table).astype(np.float16) for pool in pools]

        def finish() -> None:
            for pool, content in zip(pools, staged, strict=True):
                for row, token in enumerate(range(segment.token_begin, segment.token_end)):
                    self._cell(pool, segment, block_table, token)[:] = content[row]

        return NumpyLanding(Pieces.of_arrays([_bytes(content) for content in staged]), finish)

    def _pools(self, segment: Segment) -> list[Array]:
        return self.pools[2 * segment.layer_begin : 2 * segment.layer_end]

    def _blocks(self, segment: Segment, block_table: Sequence[int]) -> Pieces:
        first = segment.token_begin // self.layout.block_size
        last = self.layout.num_blocks_for(segment.token_end)
        pools = [_bytes(pool).reshape(len(pool), -1) for pool in self._pools(segment)]
        return Pieces.of_blocks(pools, block_table[first:last], self.shared_memory)

    def _cells(self, pool: Array, segment: Segment, block_table: Sequence[int]) -> Array:
        tokens = range(segment.token_begin, segment.token_end)
        return np.stack([self._cell(pool, segment, block_table, token) for token in tokens])

    def _cell(self, pool: Array, segment: Segment, block_table: Sequence[int], token: int) -> Array:
        block, offset = block_table[token // self.layout.block_size], token % self.layout.block_size
        heads = slice(segment.head_begin, segment.head_begin + segment.num_heads)
        if self.layout.order is PoolOrder.HEAD_MAJOR:
            return pool[block, heads, offset]
        return pool[block, offset, heads]


def _bytes(array: Array | npt.NDArray[np.float16]) -> npt.NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)
