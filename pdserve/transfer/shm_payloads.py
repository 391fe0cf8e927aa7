"""The two ends of a shm link's payloads: decode copies them out of prefill's pool, once.

::

    prefill   offer (stream): where the pieces lie, slot, number ─► hash ─► checksum (stream)
    decode                                      └─► copy and hash ─► still held? ─► compare

Both read at the same time, each on its own core. A payload whose order is not the pool's, or that
finds no free slot, is in the stream instead, behind an empty offer.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from functools import partial

from pdserve.clock import Clock
from pdserve.errors import ProtocolViolation
from pdserve.kvcache.segment import KVBytes, WireDtype
from pdserve.kvcache.shared_memory import SharedMemory
from pdserve.transfer.frame import CHECKSUM_BYTES, MAX_DATA_BYTES, Header
from pdserve.transfer.holds import Holds, PeerHolds
from pdserve.transfer.landing import Placement
from pdserve.transfer.payload import (
    Arrival,
    SourceHold,
    StreamPayloadReceiver,
    StreamPayloadSender,
    read_checksum,
)
from pdserve.transfer.stream import ByteStream, LinkLost, receive_all, send_all, skip
from pdserve.transfer.wire_choice import WireChoice

# Bytes of offsets that follow, slot, number.
_OFFER = struct.Struct("<IIQ")
_EMPTY_OFFER = _OFFER.pack(0, 0, 0)
# 8 bytes say where 64 or more lie.
_MIN_BYTES_PER_OFFSET_BYTE = 8


class SharedPayloadSender:
    """Bit for bit: rounding would cost more than it saves."""

    max_bytes = MAX_DATA_BYTES

    def __init__(self, stream: ByteStream, kv: KVBytes, holds: Holds, clock: Clock) -> None:
        self._stream = stream
        self._kv = kv
        self._holds = holds
        self._clock = clock
        self._streamed = StreamPayloadSender(stream, kv, clock, WireChoice("same", kv.layout))
        self._lock = threading.Lock()
        self._slots: dict[int, tuple[int, int]] = {}
        self._is_closed = False

    def next_wire_dtype(self) -> WireDtype:
        return WireDtype.SAME

    def send(self, header: Header, hold: SourceHold) -> int:
        if not hold.is_withdrawn():
            payload = self._kv.outgoing(header.segment, hold.block_table, header.wire_order)
            offsets = payload.shared_offsets()
            slot = self._slot_of(header.reservation_id) if offsets is not None else None
            if offsets is not None and slot is not None:
                self._send(_OFFER.pack(len(offsets), *slot), offsets, hold)
                return payload.checksum()
        self._send(_EMPTY_OFFER, b"", hold)
        return self._streamed.send(header, hold)

    def hear(self, header: Header) -> None:
        raise ProtocolViolation(f"{header.kind.name} is not for prefill")

    def forget(self, reservation_id: int) -> None:
        with self._lock:
            if slot := self._slots.pop(reservation_id, None):
                self._holds.let_go(slot[0])

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            for slot, _ in self._slots.values():
                self._holds.let_go(slot)
            self._slots.clear()

    def _slot_of(self, reservation_id: int) -> tuple[int, int] | None:
        with self._lock:
            if self._is_closed:
                raise LinkLost("the link is closed")
            slot = self._slots.get(reservation_id) or self._holds.take()
            if slot is not None:
                self._slots[reservation_id] = slot
            return slot

    def _send(self, offer: bytes, offsets: bytes, hold: SourceHold) -> None:
        send_all(
            self._stream,
            [memoryview(offer), memoryview(offsets)],
            self._clock,
            is_withdrawn=hold.is_withdrawn,
            on_withdrawn=hold.release,
        )


class SharedPayloadReceiver:
    def __init__(
        self, stream: ByteStream, kv: KVBytes, memory: SharedMemory, holds: PeerHolds, clock: Clock
    ) -> None:
        self._stream = stream
        self._kv = kv
        self._memory = memory
        self._holds = holds
        self._clock = clock
        self._streamed = StreamPayloadReceiver(stream, kv, clock)

    def receive(self, placement: Placement, let_go: Callable[[], None]) -> Arrival:
        header = placement.header
        read = partial(self._read, is_withdrawn=placement.is_withdrawn, on_withdrawn=let_go)
        num_offset_bytes, slot, number = self._offer(header, read)
        if not num_offset_bytes:
            return self._streamed.receive(placement, let_go)
        offsets = read(num_offset_bytes)

        def may_go_on() -> bool:
            return self._holds.is_held(slot, number) and not placement.is_withdrawn()

        target = self._kv.incoming(header.segment, placement.block_table, header.wire_order)
        checksum = target.payload.copy_from(self._memory, offsets, may_go_on)
        if checksum is None or not may_go_on():
            let_go()  # what was copied may be another request's, or lie in its place
        claimed = read_checksum(
            self._stream, self._clock, is_withdrawn=placement.is_withdrawn, on_withdrawn=let_go
        )
        return Arrival(checksum or 0, claimed, target.finish)

    def skip(self, header: Header) -> None:
        num_offset_bytes, _, _ = self._offer(header, self._read)
        if num_offset_bytes:
            skip(self._stream, num_offset_bytes + CHECKSUM_BYTES, self._clock)
        else:
            self._streamed.skip(header)

    def close(self) -> None:
        """The mapping ends with the last reference to it."""

    def _offer(self, header: Header, read: Callable[[int], bytes]) -> tuple[int, int, int]:
        num_offset_bytes, slot, number = _OFFER.unpack(read(_OFFER.size))
        if num_offset_bytes * _MIN_BYTES_PER_OFFSET_BYTE > header.payload_bytes:
            raise ProtocolViolation(f"{num_offset_bytes} bytes of offsets for {header.payload_bytes} bytes")
        return num_offset_bytes, slot, number

    def _read(
        self,
        num_bytes: int,
        *,
        is_withdrawn: Callable[[], bool] = lambda: False,
        on_withdrawn: Callable[[], None] = lambda: None,
    ) -> bytes:
        content = bytearray(num_bytes)
        receive_all(
            self._stream,
            [memoryview(content)],
            self._clock,
            is_withdrawn=is_withdrawn,
            on_withdrawn=on_withdrawn,
        )
        return bytes(content)
