"""The tensors behind the blocks, and the same memory as bytes for the transfer.

One K and one V tensor per layer. The engine writes and reads through ``k`` and ``v``;
``outgoing`` and ``incoming`` implement ``segment.KVBytes`` for links, on their threads.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.kvcache.cells import as_cells, states_of
from pdserve.kvcache.layout import KVLayout, PoolOrder
from pdserve.kvcache.pieces import Pieces
from pdserve.kvcache.segment import Segment, WireDtype, WireOrder, wire_layout
from pdserve.kvcache.shared_memory import SharedMemory


@dataclass(slots=True)
class _Landing:
    payload: Pieces
    finish: Callable[[], None]


class KVStorage:
    """``k[layer]``, ``v[layer]``: the pool's shape as ``KVLayout.order`` names it."""

    def __init__(
        self, layout: KVLayout, *, num_blocks: int, device: str = "cpu", is_shared: bool = False
    ) -> None:
        """``is_shared``: on a CPU, in memory that another process may be allowed to read."""
        self.layout = layout
        self.num_blocks = num_blocks
        self.device = torch.device(device)
        shape = {
            PoolOrder.HEAD_MAJOR: (num_blocks, layout.num_kv_heads, layout.block_size, layout.cell_elements),
            PoolOrder.TOKEN_MAJOR: (num_blocks, layout.block_size, layout.num_kv_heads, layout.cell_elements),
        }[layout.order]
        dtype = getattr(torch, layout.dtype)
        self.shared_memory: SharedMemory | None = None
        if is_shared:
            self.shared_memory, pools = _shared_pools(2 * layout.num_layers, shape, dtype)
        else:
            # Zeros touched now: the first request must not pay for page faults.
            pools = [
                torch.zeros(shape, dtype=dtype, device=device).fill_(0) for _ in range(2 * layout.num_layers)
            ]
        self.k, self.v = pools[0::2], pools[1::2]

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

    def outgoing(self, segment: Segment, block_table: Sequence[int], wire_order: WireOrder) -> Pieces:
        if wire_order is WireOrder.BLOCK:
            return self._blocks(segment, block_table)
        block, offset = self._cells(segment, block_table)
        return Pieces.of_arrays(
            [
                _bytes_of(self._tokens_first(pool, segment)[block, offset].contiguous())
                for pool in self._pools(segment)
            ]
        )

    def incoming(self, segment: Segment, block_table: Sequence[int], wire_order: WireOrder) -> _Landing:
        if wire_order is WireOrder.BLOCK:
            return _Landing(self._blocks(segment, block_table), lambda: None)
        block, offset = self._cells(segment, block_table)
        pools = list(self._pools(segment))
        shape = (segment.num_tokens, segment.num_heads, self.layout.cell_elements)
        staged = [torch.empty(shape, dtype=pool.dtype) for pool in pools]

        def finish() -> None:
            for pool, content in zip(pools, staged, strict=True):
                self._tokens_first(pool, segment)[block, offset] = content

        return _Landing(Pieces.of_arrays([_bytes_of(content) for content in staged]), finish)

    def outgoing_converted(
        self, segment: Segment, block_table: Sequence[int], wire_dtype: WireDtype
    ) -> Pieces:
        layout = wire_layout(self.layout, wire_dtype)
        block, offset = self._cells(segment, block_table)
        return Pieces.of_arrays(
            [
                _bytes_of(as_cells(self._tokens_first(pool, segment)[block, offset], layout))
                for pool in self._pools(segment)
            ]
        )

    def incoming_converted(
        self, segment: Segment, block_table: Sequence[int], wire_dtype: WireDtype
    ) -> _Landing:
        layout = wire_layout(self.layout, wire_dtype)
        block, offset = self._cells(segment, block_table)
        shape = (segment.num_tokens, segment.num_heads, layout.cell_elements)
        staged = [torch.empty(shape, dtype=getattr(torch, layout.dtype)) for _ in self._pools(segment)]

        def finish() -> None:
            for pool, cells in zip(self._pools(segment), staged, strict=True):
                self._tokens_first(pool, segment)[block, offset] = states_of(cells, layout).to(pool.dtype)

        return _Landing(Pieces.of_arrays([_bytes_of(cells) for cells in staged]), finish)

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

    def _blocks(self, segment: Segment, block_table: Sequence[int]) -> Pieces:
        first = segment.token_begin // self.layout.block_size
        last = self.layout.num_blocks_for(segment.token_end)
        pools = self._blocks_of_pools[2 * segment.layer_begin : 2 * segment.layer_end]
        return Pieces.of_blocks(pools, block_table[first:last], self.shared_memory)

    @cached_property
    def _blocks_of_pools(self) -> list[NDArray[np.uint8]]:
        """K and V of each layer: [blocks, bytes]."""
        every_layer = Segment(0, self.layout.num_layers, 0, self.layout.num_kv_heads, 0, 0)
        return [_bytes_of(pool).reshape(self.num_blocks, -1) for pool in self._pools(every_layer)]


def _shared_pools(
    count: int, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[SharedMemory, list[Tensor]]:
    """Each begins on a page of its own."""
    num_bytes = math.prod(shape) * dtype.itemsize
    stride_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = SharedMemory.create(count * stride_bytes)
    whole = torch.frombuffer(memory.content, dtype=torch.uint8)
    rows = whole.view(count, stride_bytes)[:, :num_bytes]
    return memory, [row.view(dtype).view(shape) for row in rows]


def _bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """The memory of a contiguous CPU tensor; bfloat16 has no numpy type, bytes do."""
    content: NDArray[np.uint8] = tensor.view(-1).view(torch.uint8).numpy()
    return content
