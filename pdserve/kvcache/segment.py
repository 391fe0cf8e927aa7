"""A rectangle of one request's KV, as it travels. Pure.

Payload, outermost first::

    WireOrder.TOKEN   layer, {K, V}, token, head, dim          any two layouts understand it
    WireOrder.BLOCK   layer, {K, V}, block, then a block as it lies in the pool

BLOCK needs equal block sizes, pool orders and all heads; ``token_begin`` lies on a block
boundary and the last block travels whole even when it is not full.

A payload may travel in fewer bytes than it has in the pools (``WireDtype``), in TOKEN order: then it is
what a pool of that type would hold, scales included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Protocol

from pdserve.kvcache.layout import KVLayout
from pdserve.kvcache.shared_memory import SharedMemory


class WireOrder(IntEnum):
    TOKEN = 0
    BLOCK = 1


class WireDtype(IntEnum):
    """Cells on the wire; SAME is bit for bit what lies in the pools."""

    SAME = 0
    FLOAT16 = 1
    BFLOAT16 = 2
    INT8 = 3
    FLOAT8 = 4


_DTYPE_NAMES = {
    WireDtype.FLOAT16: "float16",
    WireDtype.BFLOAT16: "bfloat16",
    WireDtype.INT8: "int8",
    WireDtype.FLOAT8: "float8_e4m3fn",
}


def wire_layout(layout: KVLayout, wire_dtype: WireDtype) -> KVLayout:
    """The layout of a pool whose cells are as they are on the wire."""
    return layout if wire_dtype is WireDtype.SAME else replace(layout, dtype=_DTYPE_NAMES[wire_dtype])


@dataclass(frozen=True, slots=True)
class Segment:
    """Layers × heads × tokens; token 0 is the first of the prompt."""

    layer_begin: int
    num_layers: int
    head_begin: int
    num_heads: int
    token_begin: int
    num_tokens: int

    @property
    def token_end(self) -> int:
        return self.token_begin + self.num_tokens

    @property
    def layer_end(self) -> int:
        return self.layer_begin + self.num_layers

    def payload_bytes(self, layout: KVLayout, wire_order: WireOrder) -> int:
        num_tokens = self.num_tokens
        if wire_order is WireOrder.BLOCK:
            num_tokens = layout.num_blocks_for(num_tokens) * layout.block_size
        return 2 * self.num_layers * num_tokens * self.num_heads * layout.cell_bytes


class Payload(Protocol):
    """A payload where it lies in memory, in pieces."""

    @property
    def num_bytes(self) -> int: ...

    def gather(self, begin: int, out: memoryview) -> None:
        """The payload's bytes from ``begin`` on."""

    def scatter(self, begin: int, content: memoryview) -> None:
        """The way back."""

    def shared_offsets(self) -> bytes | None:
        """Where its pieces lie in the pool's shared memory; None when another process cannot copy them."""

    def checksum(self) -> int:
        """For a payload with ``shared_offsets``."""

    def copy_from(self, memory: SharedMemory, offsets: bytes, may_go_on: Callable[[], bool]) -> int | None:
        """Out of a peer's memory, at its ``shared_offsets``. The checksum, or None when it may not go on.

        Raises ``ProtocolViolation``.
        """


class Landing(Protocol):
    """Where a payload goes: fill ``payload``, then ``finish``."""

    @property
    def payload(self) -> Payload: ...

    def finish(self) -> None:
        """Moves staged bytes to their place; the caller may still decide not to call it."""


class KVBytes(Protocol):
    """A KV pool as bytes. Methods may run on any thread, for blocks the engine leaves alone meanwhile."""

    @property
    def layout(self) -> KVLayout: ...

    @property
    def shared_memory(self) -> SharedMemory | None:
        """Where the whole pool lies, if another process may see it."""

    def outgoing(self, segment: Segment, block_table: Sequence[int], wire_order: WireOrder) -> Payload:
        """To be read; where it lies if the order allows that."""

    def incoming(self, segment: Segment, block_table: Sequence[int], wire_order: WireOrder) -> Landing:
        """To be written."""

    def outgoing_converted(
        self, segment: Segment, block_table: Sequence[int], wire_dtype: WireDtype
    ) -> Payload:
        """A converted copy in TOKEN order; the pool is not quantized."""

    def incoming_converted(
        self, segment: Segment, block_table: Sequence[int], wire_dtype: WireDtype
    ) -> Landing:
        """For such a payload; ``finish`` converts it back."""
