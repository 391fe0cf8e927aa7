"""A device's memory and queues as the transfer sees them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from pdserve.errors import ProtocolViolation
from pdserve.kvcache.layout import KVLayout
from pdserve.kvcache.segment import Segment, WireDtype, WireOrder
from pdserve.transfer.frame import Header

STAGING_BYTES = 16 << 20


class DeviceBuffer(Protocol):
    @property
    def num_bytes(self) -> int: ...

    def head(self, num_bytes: int) -> object:
        """The first bytes, in a form in which libraries take device memory."""


class Lane(Protocol):
    """A queue of a device. Its calls return at once, their work is done in order.

    For one thread at a time. All raise ``DeviceFault``.
    """

    @property
    def handle(self) -> int:
        """The ``cudaStream_t``, for libraries that put work of their own on the lane."""

    def gather(
        self, segment: Segment, block_table: Sequence[int], wire_order: WireOrder, into: DeviceBuffer
    ) -> None:
        """The segment's payload; after everything that the engine has enqueued so far."""

    def scatter(
        self, segment: Segment, block_table: Sequence[int], wire_order: WireOrder, source: DeviceBuffer
    ) -> None:
        """The payload into the blocks; after everything that the engine has enqueued so far."""

    def copy(self, source: DeviceBuffer, target: DeviceBuffer, num_bytes: int) -> None: ...

    def checksum(self, buffer: DeviceBuffer, num_bytes: int) -> Callable[[], int]:
        """What the function returns is right once the work up to here is done."""

    def mark(self) -> Callable[[], bool]:
        """Whether the work up to here is done."""


class DeviceKV(Protocol):
    """A KV pool on a device."""

    @property
    def layout(self) -> KVLayout: ...

    def use_device(self) -> None:
        """Makes it the calling thread's current one: libraries look there."""

    def new_lane(self) -> Lane: ...

    def new_buffer(self, num_bytes: int) -> DeviceBuffer: ...


def check_payload(header: Header, num_bytes: int) -> None:
    """For a DATA header that may be none of ours. Raises ``ProtocolViolation``."""
    if header.payload_bytes > num_bytes:
        raise ProtocolViolation(f"{header.payload_bytes} bytes in one payload, {num_bytes} agreed")
    if header.wire_dtype is not WireDtype.SAME:
        raise ProtocolViolation(f"cells of {header.wire_dtype.name} between GPUs")


def staging_bytes(layout: KVLayout) -> int:
    """At least one layer of a block fits."""
    return max(STAGING_BYTES, layout.block_bytes // layout.num_layers)
