"""How the payload of a DATA frame travels: in the link's stream, or beside it.

The frames are the same for all transports (``sender``, ``receiver``); this is what may differ.
The checksum follows the payload on the stream in either case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import xxhash

from pdserve.clock import Clock
from pdserve.errors import ProtocolViolation
from pdserve.kvcache.segment import KVBytes, Landing, Payload, WireDtype
from pdserve.transfer.frame import CHECKSUM, CHECKSUM_BYTES, MAX_DATA_BYTES, Header
from pdserve.transfer.landing import Placement
from pdserve.transfer.stream import ByteStream, receive_all, send_all, skip
from pdserve.transfer.wire_choice import WireChoice


@dataclass(frozen=True, slots=True)
class SourceHold:
    """The right to read a push's blocks: ``release`` it when they are not needed any more.

    ``is_withdrawn``: the push was given up, so the blocks must be let go; what is sent then is
    forgotten. ``release`` may be called early, from the sending thread; it is idempotent.
    """

    block_table: Sequence[int]
    is_withdrawn: Callable[[], bool]
    release: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A payload that is here. ``finish`` puts staged bytes into the blocks."""

    checksum: int
    claimed: int
    finish: Callable[[], None]


class PayloadSender(Protocol):
    """Prefill's end. One thread sends; ``hear`` and ``close`` come from others."""

    @property
    def max_bytes(self) -> int:
        """What is larger travels as several segments."""

    def next_wire_dtype(self) -> WireDtype:
        """For the payloads of the next push."""

    def send(self, header: Header, hold: SourceHold) -> int:
        """Its checksum. Raises ``PeerError``."""

    def forget(self, reservation_id: int) -> None:
        """The blocks of its push are about to be let go. From any thread."""

    def hear(self, header: Header) -> None:
        """TAKEN, from decode. Raises ``ProtocolViolation``."""

    def close(self) -> None:
        """Idempotent; ``send`` then raises ``LinkLost``."""


class PayloadReceiver(Protocol):
    """Decode's end, on the link's thread."""

    def receive(self, placement: Placement, let_go: Callable[[], None]) -> Arrival:
        """Calls ``let_go`` when the placement is withdrawn meanwhile. Raises ``PeerError``."""

    def skip(self, header: Header) -> None:
        """Takes the payload and its checksum and forgets them."""

    def close(self) -> None:
        """Idempotent, from any thread."""


# For transports whose payloads travel beside the stream, by name: after the hellos, see
# ``device.pairing``. The number bounds the wait in seconds; the dictionary is PAIR's. Both raise PeerError.
OpenSender = Callable[[ByteStream, float], PayloadSender]
OpenReceiver = Callable[[ByteStream, dict[str, object]], PayloadReceiver]
SenderOpeners = Mapping[str, OpenSender]
ReceiverOpeners = Mapping[str, OpenReceiver]


# Fits into a core's second-level cache: what was gathered, or has arrived, is hashed and moved on from there.
STAGING_BYTES = 512 << 10


class StreamPayloadSender:
    """Out of the pool's memory into the stream."""

    max_bytes = MAX_DATA_BYTES

    def __init__(self, stream: ByteStream, kv: KVBytes, clock: Clock, choice: WireChoice) -> None:
        self._stream = stream
        self._kv = kv
        self._clock = clock
        self._choice = choice
        self._staging = memoryview(bytearray(STAGING_BYTES))

    def next_wire_dtype(self) -> WireDtype:
        return self._choice.next()

    def send(self, header: Header, hold: SourceHold) -> int:
        payload = None if hold.is_withdrawn() else self._source(header, hold)
        digest = xxhash.xxh3_64()
        begin_s = self._clock.now_s()
        for begin in range(0, header.payload_bytes, STAGING_BYTES):
            part = self._staging[: header.payload_bytes - begin]
            if payload is not None and not hold.is_withdrawn():
                payload.gather(begin, part)
            digest.update(part)
            send_all(
                self._stream,
                [part],
                self._clock,
                is_withdrawn=hold.is_withdrawn,
                on_withdrawn=hold.release,
            )
        self._choice.sent(header.payload_bytes, self._clock.now_s() - begin_s)
        return digest.intdigest()

    def _source(self, header: Header, hold: SourceHold) -> Payload:
        if header.wire_dtype is WireDtype.SAME:
            return self._kv.outgoing(header.segment, hold.block_table, header.wire_order)
        begin_s = self._clock.now_s()
        payload = self._kv.outgoing_converted(header.segment, hold.block_table, header.wire_dtype)
        pool_bytes = header.segment.payload_bytes(self._kv.layout, header.wire_order)
        self._choice.converted(pool_bytes, self._clock.now_s() - begin_s)
        return payload

    def forget(self, reservation_id: int) -> None:
        """Whatever was sent has been copied."""

    def hear(self, header: Header) -> None:
        raise ProtocolViolation(f"{header.kind.name} is not for prefill")

    def close(self) -> None:
        """The stream is closed by its owner."""


class StreamPayloadReceiver:
    """Out of the stream into the pool's memory."""

    def __init__(self, stream: ByteStream, kv: KVBytes, clock: Clock) -> None:
        self._stream = stream
        self._kv = kv
        self._clock = clock
        self._staging = memoryview(bytearray(STAGING_BYTES))

    def receive(self, placement: Placement, let_go: Callable[[], None]) -> Arrival:
        target = self._target(placement)
        digest = xxhash.xxh3_64()
        num_bytes = placement.header.payload_bytes
        for begin in range(0, num_bytes, STAGING_BYTES):
            part = self._staging[: num_bytes - begin]
            receive_all(
                self._stream,
                [part],
                self._clock,
                is_withdrawn=placement.is_withdrawn,
                on_withdrawn=let_go,
            )
            digest.update(part)
            if not placement.has_let_go:
                target.payload.scatter(begin, part)
        claimed = read_checksum(
            self._stream, self._clock, is_withdrawn=placement.is_withdrawn, on_withdrawn=let_go
        )
        return Arrival(digest.intdigest(), claimed, target.finish)

    def _target(self, placement: Placement) -> Landing:
        header = placement.header
        if header.wire_dtype is WireDtype.SAME:
            return self._kv.incoming(header.segment, placement.block_table, header.wire_order)
        return self._kv.incoming_converted(header.segment, placement.block_table, header.wire_dtype)

    def skip(self, header: Header) -> None:
        skip(self._stream, header.payload_bytes + CHECKSUM_BYTES, self._clock)

    def close(self) -> None:
        """The stream is closed by its owner."""


def read_checksum(
    stream: ByteStream, clock: Clock, *, is_withdrawn: Callable[[], bool], on_withdrawn: Callable[[], None]
) -> int:
    content = memoryview(bytearray(CHECKSUM_BYTES))
    receive_all(stream, [content], clock, is_withdrawn=is_withdrawn, on_withdrawn=on_withdrawn)
    return int(CHECKSUM.unpack(content)[0])
