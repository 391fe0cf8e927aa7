"""The tensors behind the blocks, and the same memory as bytes for the transfer.

One K and one V tensor per layer. The engine writes and reads through ``k`` and ``v``;
``read_views`` and ``write_views`` implement ``segment.KVBytes`` for links, on their threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.kvcache.cells import as_cells, states_of
from pdserve.kvcache.layout import KVLayout, PoolOrder
from pdserve.kvcache.segment import Segment, WireDtype, WireOrder, wire_layout


@dataclass(slots=True)
class _Landing:
    views: list[memoryview]
    finish: Callable[[], None]


class KVStorage:
    """``k[layer]``, ``v[layer]``: the pool's shape as ``KVLayout.order`` names it."""

    def __init__(self, layout: KVLayout, *, num_blocks: int, device: str = "cpu") -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.device = torch.device(device)
        shape = {
            PoolOrder.HEAD_MAJOR: (num_blocks, layout.num_kv_heads, layout.block_size, layout.cell_elements),
            PoolOrder.TOKEN_MAJOR: (num_blocks, layout.block_size, layout.num_kv_heads, layout.cell_elements),
        }[layout.order]
        dtype = getattr(torch, layout.dtype)
        # Zeros touched now: the first request must not pay for page faults.
        self.k = [torch.zeros(shape, dtype=dtype, device=device).fill_(0) for _ in range(layout.num_layers)]
        self.v = [torch.zeros(shape, dtype=dtype, device=device).fill_(0) for _ in range(layout.num_layers)]

    def write(self, layer: int, keys: Tensor, values: Tensor, slot_mapping: Tensor) -> None:
        """``keys``, ``values``: [tokens, kv_heads, head_dim].

        ``slot_mapping``: [tokens], each block * block_size + offset.
        """
        slot_mapping = slot_mapping.to(self.device)
        block, offset = slot_mapping // self.layout.block_size, slot_mapping % self.layout.block_size
        for pool, new in ((self.k[layer], keys), (self.v[layer], values)):
            cells = as_cells(new, self.layout)
            if self.layout.order is PoolOrder.HEAD_MAJOR:
                pool[block, :, offset] = cells
            else:
                pool[block, offset] = cells

    def gather(self, layer: int, block_table: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """K and V of the first ``num_tokens`` of a sequence, each [kv_heads, num_tokens, head_dim]."""
        keys, values = (
            self._by_head(pool, block_table)[:, :num_tokens] for pool in (self.k[layer], self.v[layer])
        )
        return states_of(keys, self.layout), states_of(values, self.layout)

    def _by_head(self, pool: Tensor, block_table: Tensor) -> Tensor:
        blocks = pool[block_table]
        if self.layout.order is PoolOrder.HEAD_MAJOR:
            return blocks.transpose(0, 1).flatten(1, 2)
        return blocks.flatten(0, 1).transpose(0, 1)

    # ------------------------------------------------------------- as bytes

    def read_views(
        self, segment: Segment, block_table: Sequence[int], wire_order: WireOrder
    ) -> list[memoryview]:
        if wire_order is WireOrder.BLOCK:
            return self._block_views(segment, block_table)
        block, offset = self._cells(segment, block_table)
        return [
            _bytes_of(self._tokens_first(pool, segment)[block, offset].contiguous())
            for pool in self._pools(segment)
        ]

    def write_views(self, segment: Segment, block_table: Sequence[int], wire_order: WireOrder) -> _Landing:
        if wire_order is WireOrder.BLOCK:
            return _Landing(self._block_views(segment, block_table), lambda: None)
        block, offset = self._cells(segment, block_table)
        pools = list(self._pools(segment))
        shape = (segment.num_tokens, segment.num_heads, self.layout.cell_elements)
        staged = [torch.empty(shape, dtype=pool.dtype) for pool in pools]

        def finish() -> None:
            for pool, content in zip(pools, staged, strict=True):
                self._tokens_first(pool, segment)[block, offset] = content

        return _Landing([_bytes_of(content) for content in staged], finish)

    def read_converted(
        self, segment: Segment, block_table: Sequence[int], wire_dtype: WireDtype
    ) -> list[memoryview]:
        layout = wire_layout(self.layout, wire_dtype)
        block, offset = self._cells(segment, block_table)
        return [
            _bytes_of(as_cells(self._tokens_first(pool, segment)[block, offset], layout))
            for pool in self._pools(segment)
        ]

    def write_converted(
        self, segment: Segment, block_table: Sequence[int], wire_dtype: WireDtype
    ) -> _Landing:
        layout = wire_layout(self.layout, wire_dtype)
        block, offset = self._cells(segment, block_table)
        shape = (segment.num_tokens, segment.num_heads, layout.cell_elements)
        staged = [torch.empty(shape, dtype=getattr(torch, layout.dtype)) for _ in self._pools(segment)]

        def finish() -> None:
            for pool, cells in zip(self._pools(segment), staged, strict=True):
                self._tokens_first(pool, segment)[block, offset] = states_of(cells, layout).to(pool.dtype)

        return _Landing([_bytes_of(cells) for cells in staged], finish)

    def _pools(self, segment: Segment) -> Iterator[Tensor]:
        for layer in range(segment.layer_begin, segment.layer_end):
            yield self.k[layer]
            yield self.v[layer]

    def _tokens_first(self, pool: Tensor, segment: Segment) -> Tensor:
        """A view [block, token, head, dim] of the segment's heads."""
        if self.layout.order is PoolOrder.HEAD_MAJOR:
            pool = pool.transpose(1, 2)
        return pool[:, :, segment.head_begin : segment.head_begin + segment.num_heads]

    def _cells(self, segment: Segment, block_table: Sequence[int]) -> tuple[Tensor, Tensor]:
        positions = torch.arange(segment.token_begin, segment.token_end)
        block = torch.tensor(block_table)[positions // self.layout.block_size]
        return block, positions % self.layout.block_size

    def _block_views(self, segment: Segment, block_table: Sequence[int]) -> list[memoryview]:
        first = segment.token_begin // self.layout.block_size
        last = self.layout.num_blocks_for(segment.token_end)
        num_bytes = self.layout.num_kv_heads * self.layout.block_size * self.layout.cell_bytes
        runs = [
            slice(begin * num_bytes, (begin + count) * num_bytes)
            for begin, count in _runs(block_table[first:last])
        ]
        # Slices of one view per pool: thousands of small tensors would cost more than the copy.
        return [whole[run] for whole in map(_bytes_of, self._pools(segment)) for run in runs]


def _runs(block_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Adjacent ascending ids as (first, count)."""
    begin, count = block_ids[0], 0
    for block_id in block_ids:
        if block_id != begin + count:
            yield begin, count
            begin, count = block_id, 0
        count += 1
    yield begin, count


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor; bfloat16 has no numpy type, bytes do."""
    return tensor.view(-1).view(torch.uint8).numpy().data
