"""What a pool of KV blocks looks like in memory, in plain data that can cross a wire. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "float8_e4m3fn": 1}
QUANTIZED_DTYPES = ("int8", "float8_e4m3fn")
# Behind the elements of a quantized cell: their scale, a float32.
SCALE_BYTES = 4


class PoolOrder(StrEnum):
    """Axes of one layer's K (or V) pool, outermost first."""

    TOKEN_MAJOR = "block,token,head,dim"  # what CUDA's varlen attention reads
    HEAD_MAJOR = "block,head,token,dim"  # what CPU kernels read faster


@dataclass(frozen=True, slots=True)
class KVLayout:
    """One worker's KV pool. K and V of a layer are two separate arrays of this shape."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    block_size: int
    order: PoolOrder

    @property
    def cell_elements(self) -> int:
        """Length of the pool's last axis: the head, and where it is quantized the bytes of its scale."""
        return self.head_dim + (SCALE_BYTES if self.is_quantized else 0)

    @property
    def is_quantized(self) -> bool:
        return self.dtype in QUANTIZED_DTYPES

    @property
    def cell_bytes(self) -> int:
        """K (or V) of one token and one head in one layer."""
        return self.cell_elements * DTYPE_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """K and V of one token over all layers and heads."""
        return 2 * self.num_layers * self.num_kv_heads * self.cell_bytes

    @property
    def block_bytes(self) -> int:
        """K and V of one block over all layers and heads."""
        return self.token_bytes * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
