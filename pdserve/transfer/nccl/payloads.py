"""The two ends of a link whose payloads go by NCCL.

::

    prefill  gather ─ blocks are free ─ send ───────────┐ checksum (stream)
    decode   DATA header (stream) ─ begin ─ receive ────┴ checksum ─ compare ─ scatter

Decode looks at the stream while it receives: over NVLink a peer that died is only silent, its
socket is not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pdserve.clock import Clock
from pdserve.errors import PeerError, ProtocolViolation
from pdserve.kvcache.segment import WireDtype
from pdserve.transfer.device.checksum_tail import ChecksumTail
from pdserve.transfer.device.memory import check_payload
from pdserve.transfer.device.pairing import (
    PairRefused,
    answer_pair,
    data,
    number,
    payload_room,
    request_pair,
    text,
)
from pdserve.transfer.device.wait import wait_until
from pdserve.transfer.frame import Header
from pdserve.transfer.landing import Placement
from pdserve.transfer.nccl.pair import DECODE_RANK, PREFILL_RANK, NcclPair, NcclPairs
from pdserve.transfer.payload import Arrival, SourceHold
from pdserve.transfer.stream import ByteStream

NAME = "nccl"
INIT_LIMIT_S = 5.0


def open_sender(pairs: NcclPairs, clock: Clock, stream: ByteStream, limit_s: float) -> NcclPayloadSender:
    """Raises ``PeerError``; then the link is of no use."""
    pairs.check_room()
    request: dict[str, object] = {"version": pairs.library.version()}
    answer = request_pair(stream, NAME, request, clock, limit_s=limit_s)
    unique_id = data(answer, "unique_id")
    room = payload_room(pairs.layout, min(pairs.staging_bytes, number(answer, "staging_bytes")))
    pair = pairs.open(unique_id, rank=PREFILL_RANK, limit_s=limit_s)
    return NcclPayloadSender(pair, clock, max_bytes=room)


def open_receiver(
    pairs: NcclPairs, clock: Clock, stream: ByteStream, request: dict[str, object]
) -> NcclPayloadReceiver:
    """Answers PAIR. Raises ``PairRefused`` before the answer, ``PeerError`` after it."""
    ours, theirs = pairs.library.version(), text(request, "version")
    if ours != theirs:
        raise PairRefused(f"NCCL is {ours} here and {theirs} there")
    try:
        unique_id = pairs.unique_id()
    except PeerError as error:
        raise PairRefused(str(error)) from error
    answer: dict[str, object] = {"unique_id": unique_id.hex(), "staging_bytes": pairs.staging_bytes}
    answer_pair(stream, answer, clock)
    return NcclPayloadReceiver(pairs.open(unique_id, rank=DECODE_RANK, limit_s=INIT_LIMIT_S), stream, clock)


class NcclPayloadSender:
    def __init__(self, pair: NcclPair, clock: Clock, *, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._pair = pair
        self._clock = clock

    def next_wire_dtype(self) -> WireDtype:
        """Between GPUs rounding costs more than it saves."""
        return WireDtype.SAME

    def send(self, header: Header, hold: SourceHold) -> int:
        lane, staging = self._pair.lane, self._pair.staging
        with self._pair.inside():
            if not hold.is_withdrawn():
                lane.gather(header.segment, hold.block_table, header.wire_order, staging)
            checksum = lane.checksum(staging, header.payload_bytes)
            is_gathered = lane.mark()
        self._wait(is_gathered, "nccl: gather")
        hold.release()
        self._pair.send(header.payload_bytes)
        self._wait(self._pair.is_ready, "nccl: send")
        self._wait(self._pair.mark(), "nccl: send")
        return checksum()

    def forget(self, reservation_id: int) -> None:
        """Whatever was sent has been gathered."""

    def hear(self, header: Header) -> None:
        raise ProtocolViolation(f"{header.kind.name} does not go with NCCL")

    def close(self) -> None:
        self._pair.close()

    def _wait(self, is_done: Callable[[], bool], what: str) -> None:
        wait_until(is_done, self._clock, what=what, watch=self._pair.is_ready)


class NcclPayloadReceiver:
    def __init__(self, pair: NcclPair, stream: ByteStream, clock: Clock) -> None:
        self._pair = pair
        self._stream = stream
        self._clock = clock

    def receive(self, placement: Placement, let_go: Callable[[], None]) -> Arrival:
        tail = ChecksumTail(self._stream)

        def watch() -> None:
            self._pair.is_ready()
            tail.poll()
            if placement.is_withdrawn():
                let_go()

        checksum = self._take(placement.header, watch)
        claimed = tail.read(self._clock, is_withdrawn=placement.is_withdrawn, on_withdrawn=let_go)
        return Arrival(checksum(), claimed, partial(self._scatter, placement))

    def skip(self, header: Header) -> None:
        tail = ChecksumTail(self._stream)

        def watch() -> None:
            self._pair.is_ready()
            tail.poll()

        self._take(header, watch)
        tail.read(self._clock)

    def close(self) -> None:
        self._pair.close()

    def _take(self, header: Header, watch: Callable[[], None]) -> Callable[[], int]:
        """The payload lies in the staging memory; its checksum."""
        lane, staging = self._pair.lane, self._pair.staging
        check_payload(header, staging.num_bytes)
        self._pair.receive(header.payload_bytes)
        wait_until(self._pair.is_ready, self._clock, what="nccl: receive", watch=watch)
        with self._pair.inside():
            checksum = lane.checksum(staging, header.payload_bytes)
        wait_until(self._pair.mark(), self._clock, what="nccl: receive", watch=watch)
        return checksum

    def _scatter(self, placement: Placement) -> None:
        """Whatever becomes of the pair meanwhile: this is our own copy."""
        header, lane, staging = placement.header, self._pair.lane, self._pair.staging
        with self._pair.inside():
            lane.scatter(header.segment, placement.block_table, header.wire_order, staging)
            is_scattered = lane.mark()
        wait_until(is_scattered, self._clock, what="nccl: scatter")
