"""The two ends of a link whose payloads are copied into the peer's memory.

::

    prefill  gather ─ blocks are free ─ copy into decode's buffer ─ checksum (stream)
    decode   copy into a buffer of its own ─ TAKEN (stream) ─ checksum ─ compare ─ scatter

Decode's second buffer is what makes the checksum worth something: nobody else can write to it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pdserve.clock import Clock
from pdserve.errors import DeviceFault, PeerError, ProtocolViolation
from pdserve.kvcache.segment import WireDtype
from pdserve.transfer.control import send_frame
from pdserve.transfer.cuda_ipc.exports import Export, IpcExports
from pdserve.transfer.cuda_ipc.host import ProcessIdentity, check_neighbour, identity_from
from pdserve.transfer.cuda_ipc.mappings import IpcMappings, Mapping
from pdserve.transfer.device.checksum_tail import ChecksumTail
from pdserve.transfer.device.memory import DeviceKV, check_payload, staging_bytes
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
from pdserve.transfer.frame import FrameKind, Header
from pdserve.transfer.landing import Placement
from pdserve.transfer.payload import Arrival, SourceHold
from pdserve.transfer.stream import ByteStream

logger = logging.getLogger(__name__)

NAME = "cuda-ipc"


def open_sender(
    mappings: IpcMappings, identity: ProcessIdentity, clock: Clock, stream: ByteStream, limit_s: float
) -> IpcPayloadSender:
    """Raises ``PeerError``; then the link is of no use."""
    request = {**identity.as_dict(), "unmapped": mappings.unmapped_names()}
    answer = request_pair(stream, NAME, request, clock, limit_s=limit_s)
    max_bytes = payload_room(mappings.kv.layout, number(answer, "num_bytes"))
    mappings.kv.use_device()
    mapping = mappings.open(text(answer, "name"), data(answer, "handle"), max_bytes)
    return IpcPayloadSender(mapping, clock, max_bytes=max_bytes)


@dataclass(frozen=True, slots=True)
class IpcDecode:
    """What decode's end of every link needs."""

    exports: IpcExports
    kv: DeviceKV
    identity: ProcessIdentity
    clock: Clock

    def open_receiver(self, stream: ByteStream, request: dict[str, object]) -> IpcPayloadReceiver:
        """Answers PAIR. Raises ``PairRefused`` before the answer, ``PeerError`` after it."""
        theirs = identity_from(request)
        check_neighbour(self.identity, theirs)
        self.exports.unmapped(_names(request))
        num_bytes = staging_bytes(self.kv.layout)
        try:
            self.kv.use_device()
            export = self.exports.new(num_bytes, pid=theirs.pid)
        except DeviceFault as error:
            raise PairRefused(str(error)) from error
        receiver = self._receiver(export, stream)
        answer: dict[str, object] = {
            "name": export.name,
            "handle": export.handle.hex(),
            "num_bytes": num_bytes,
        }
        try:
            answer_pair(stream, answer, self.clock)
        except PeerError:
            receiver.close()
            raise
        return receiver

    def _receiver(self, export: Export, stream: ByteStream) -> IpcPayloadReceiver:
        try:
            return IpcPayloadReceiver(self, export, stream)
        except DeviceFault as error:
            self.exports.retire(export, lambda: True)
            self.exports.unmapped([export.name])  # the peer has not heard of it
            raise PairRefused(str(error)) from error


class IpcPayloadSender:
    def __init__(self, mapping: Mapping, clock: Clock, *, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._mapping = mapping
        self._clock = clock
        self._is_taken = threading.Event()
        self._is_taken.set()

    def next_wire_dtype(self) -> WireDtype:
        """Between GPUs rounding costs more than it saves."""
        return WireDtype.SAME

    def send(self, header: Header, hold: SourceHold) -> int:
        mapping, num_bytes = self._mapping, header.payload_bytes
        with mapping.tenancy.inside():
            if not hold.is_withdrawn():
                mapping.lane.gather(header.segment, hold.block_table, header.wire_order, mapping.staging)
            checksum = mapping.lane.checksum(mapping.staging, num_bytes)
            is_gathered = mapping.lane.mark()
        self._wait(is_gathered, "gather")
        hold.release()
        self._wait(self._is_taken.is_set, "the payload before this one")
        self._is_taken.clear()
        with mapping.tenancy.inside():
            mapping.lane.copy(mapping.staging, mapping.remote, num_bytes)
            is_copied = mapping.lane.mark()
        self._wait(is_copied, "copy")
        return checksum()

    def forget(self, reservation_id: int) -> None:
        """Whatever was sent has been gathered."""

    def hear(self, header: Header) -> None:
        if self._is_taken.is_set():
            raise ProtocolViolation("TAKEN, and nothing was there")
        self._is_taken.set()

    def close(self) -> None:
        self._mapping.close()

    def _wait(self, is_done: Callable[[], bool], what: str) -> None:
        wait_until(is_done, self._clock, what=f"cuda-ipc: {what}", watch=self._mapping.check_open)


class IpcPayloadReceiver:
    def __init__(self, decode: IpcDecode, export: Export, stream: ByteStream) -> None:
        self._decode = decode
        self._export = export
        self._stream = stream
        self._lane = decode.kv.new_lane()
        self._own = decode.kv.new_buffer(export.buffer.num_bytes)
        self._is_closed = False

    def receive(self, placement: Placement, let_go: Callable[[], None]) -> Arrival:
        claimed = self._await_payload(
            placement.header, is_withdrawn=placement.is_withdrawn, on_withdrawn=let_go
        )
        checksum = self._lane.checksum(self._own, placement.header.payload_bytes)
        self._finish("checksum")
        return Arrival(checksum(), claimed, partial(self._scatter, placement))

    def skip(self, header: Header) -> None:
        self._await_payload(header, is_withdrawn=lambda: False, on_withdrawn=lambda: None)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._decode.exports.retire(self._export, self._idleness())

    def _idleness(self) -> Callable[[], bool]:
        try:
            return self._lane.mark()
        except DeviceFault as error:
            logger.error("cuda_ipc_buffer_lost detail=%s", error)
            return lambda: False  # nobody will ever know

    def _await_payload(
        self, header: Header, *, is_withdrawn: Callable[[], bool], on_withdrawn: Callable[[], None]
    ) -> int:
        """The payload lies in the buffer that is ours alone, and the peer may go on. The peer's checksum."""
        check_payload(header, self._own.num_bytes)
        tail = ChecksumTail(self._stream)
        claimed = tail.read(self._decode.clock, is_withdrawn=is_withdrawn, on_withdrawn=on_withdrawn)
        self._lane.copy(self._export.buffer, self._own, header.payload_bytes)
        self._finish("copy")
        send_frame(self._stream, Header(FrameKind.TAKEN), b"", self._decode.clock)
        return claimed

    def _scatter(self, placement: Placement) -> None:
        header = placement.header
        self._lane.scatter(header.segment, placement.block_table, header.wire_order, self._own)
        self._finish("scatter")

    def _finish(self, what: str) -> None:
        wait_until(self._lane.mark(), self._decode.clock, what=f"cuda-ipc: {what}")


def _names(request: dict[str, object]) -> list[str]:
    names = request.get("unmapped")
    if not isinstance(names, list):
        raise ProtocolViolation(f"unmapped is {names!r}, not a list")
    return [str(name) for name in names]
