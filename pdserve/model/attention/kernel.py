"""Attention through the CPU kernels, straight on the paged pool."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.kernels.attention import attend_kernel, num_scratch_floats
from pdserve.kernels.elementwise import quantize_kv, write_kv
from pdserve.kernels.lanes import LANES
from pdserve.kvcache.layout import KVLayout, PoolOrder
from pdserve.kvcache.storage import KVStorage
from pdserve.model.attention.base import AttentionParams, Rows
from pdserve.model.cpu_threads import CpuThreads

# numba has no short floats: their bits travel as integers, see kernels.lanes.
_AS_STORED = {
    torch.float32: torch.float32,
    torch.float16: torch.uint16,
    torch.bfloat16: torch.int16,
    torch.int8: torch.int8,
    torch.float8_e4m3fn: torch.uint8,
}


def supports(layout: KVLayout) -> bool:
    return layout.order is PoolOrder.HEAD_MAJOR and layout.head_dim % LANES == 0


class KernelAttention:
    def __init__(self, storage: KVStorage, threads: CpuThreads) -> None:
        assert supports(storage.layout), storage.layout
        self._pools = [(_array(k), _array(v)) for k, v in zip(storage.k, storage.v, strict=True)]
        self._write = quantize_kv if storage.layout.is_quantized else write_kv
        self._num_kv_heads = storage.layout.num_kv_heads
        self._threads = threads

    def write(self, layer: int, keys: Tensor, values: Tensor, rows: Rows) -> None:
        for pool, states in zip(self._pools[layer], (keys, values), strict=True):
            self._write(_rows_contiguous(states), pool, rows.slot_mapping)

    def attend(self, layer: int, query: Tensor, rows: Rows, params: AttentionParams) -> Tensor:
        num_tokens, num_heads, head_dim = query.shape
        group = num_heads // self._num_kv_heads
        kernel = attend_kernel(head_dim, group)
        k_pool, v_pool = self._pools[layer]
        output = np.empty((num_tokens, num_heads, head_dim), np.float32)
        num_scratch = num_scratch_floats(int(rows.num_context.max()), head_dim, group)

        def heads(begin: int, end: int) -> None:
            kernel(
                query.numpy(), k_pool, v_pool, output,
                rows.query_begin, rows.num_queries, rows.num_context, rows.block_tables,
                params.window or 0, np.float32(params.scale), np.float32(params.softcap or 0.0),
                np.empty(num_scratch, np.float32), begin, end,
            )  # fmt: skip

        num_multiplications = int((rows.num_queries * rows.num_context).sum()) * num_heads * head_dim * 2
        self._threads.split(heads, self._num_kv_heads, num_multiplications)
        return torch.from_numpy(output)


def _array(pool: Tensor) -> NDArray[np.generic]:
    array: NDArray[np.generic] = pool.view(_AS_STORED[pool.dtype]).numpy()
    return array


def _rows_contiguous(states: Tensor) -> NDArray[np.float32]:
    """[tokens, heads, head_dim] as floats whose last axis is contiguous; a view where it is that already."""
    states = states.float()
    array: NDArray[np.float32] = (states if states.stride(2) == 1 else states.contiguous()).numpy()
    return array
