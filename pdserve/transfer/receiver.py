"""Reads one link's frames until it ends; every decision is the landing table's."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

from pdserve.clock import Clock
from pdserve.errors import IncompatiblePeer, PeerError, ProtocolViolation
from pdserve.transfer.device.pairing import PairRefused, answer_pair, text
from pdserve.transfer.frame import (
    HEADER_BYTES,
    Commit,
    FrameKind,
    Header,
    pack_json,
    pack_reason,
    unpack_header,
    unpack_json,
    unpack_reason,
)
from pdserve.transfer.hello import Hello, check_compatible
from pdserve.transfer.landing import LandingTable
from pdserve.transfer.payload import PayloadReceiver, ReceiverOpeners, StreamPayloadReceiver
from pdserve.transfer.stream import ByteStream, receive_all, send_all

logger = logging.getLogger(__name__)

IDLE_FOREVER_S = float("inf")


def serve_link(
    stream: ByteStream, table: LandingTable, clock: Clock, payload_openers: ReceiverOpeners | None = None
) -> None:
    """Blocks until the link ends. What was open on it is aborted; nothing is raised.

    ``payload_openers``: the ways beside the stream that the peer may ask for.
    """
    receiver = _Receiver(stream, table, clock, payload_openers or {})
    try:
        receiver.greet()
        while True:
            receiver.handle(receiver.next_header())
    except PeerError as error:
        reason = error.label
        logger.info("link_ended reason=%s detail=%s", reason, error)
    finally:
        receiver.payloads.close()
        stream.close()
    table.connection_lost(stream, reason)


class _Receiver:
    def __init__(
        self, stream: ByteStream, table: LandingTable, clock: Clock, payload_openers: ReceiverOpeners
    ) -> None:
        self._stream = stream
        self._table = table
        self._clock = clock
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._payload_openers = payload_openers
        self._is_paired = False
        self.payloads: PayloadReceiver = StreamPayloadReceiver(stream, table.kv, clock)

    def greet(self) -> None:
        """Raises ``IncompatiblePeer`` or ``ProtocolViolation`` after telling the peer."""
        header = self._read_header(limit_s=5.0)
        if header.kind is not FrameKind.HELLO:
            raise ProtocolViolation(f"a link starts with HELLO, not {header.kind.name}")
        theirs = Hello.from_dict(unpack_json(self._payload(header)))
        ours = self._table.hello
        try:
            check_compatible(ours, theirs)
        except IncompatiblePeer as error:
            answer: dict[str, object] = {"refused": error.field, **ours.as_dict()}
            self._reply(Header(FrameKind.HELLO_REPLY), pack_json(answer))
            raise
        self._reply(Header(FrameKind.HELLO_REPLY), pack_json(ours.as_dict()))

    def next_header(self) -> Header:
        """An idle link may wait for ever: nothing is held for it."""
        return self._read_header(limit_s=IDLE_FOREVER_S)

    def handle(self, header: Header) -> None:
        match header.kind:
            case FrameKind.DATA:
                self._data(header)
            case FrameKind.OPEN:
                reason = self._table.open(header, self._payload(header), self._stream)
                if reason:
                    self._aborted(header, reason)
            case FrameKind.COMMIT:
                reason = self._table.commit(header, Commit.unpack(self._payload(header)), self._stream)
                if reason:
                    self._aborted(header, reason)
                else:
                    self._reply(Header(FrameKind.SEALED, header.reservation_id, header.fence), b"")
            case FrameKind.ABORT:
                self._table.abort(header, unpack_reason(self._payload(header)), self._stream)
            case FrameKind.PAIR:
                self._pair(unpack_json(self._payload(header)))
            case _:
                raise ProtocolViolation(f"{header.kind.name} is not for decode")

    def _pair(self, request: dict[str, object]) -> None:
        """The payloads leave the stream, for good."""
        if self._is_paired:
            raise ProtocolViolation("a link is paired once")
        transport = text(request, "transport")
        open_payloads = self._payload_openers.get(transport)
        if open_payloads is None:
            answer_pair(self._stream, {"refused": "not offered here"}, self._clock)
            raise PairRefused(f"{transport} is not offered here")
        try:
            self.payloads = open_payloads(self._stream, request)
        except PairRefused as error:
            answer_pair(self._stream, {"refused": str(error)}, self._clock)
            raise
        self._is_paired = True

    def _data(self, header: Header) -> None:
        placement = self._table.begin(header, self._stream)
        if placement is None:
            self.payloads.skip(header)
            return
        let_go = partial(self._table.let_go, placement)
        try:
            arrival = self.payloads.receive(placement, let_go)
        except PeerError:
            let_go()
            raise
        self._table.end(placement, arrival.checksum, claimed=arrival.claimed, finish=arrival.finish)

    def _aborted(self, header: Header, reason: str) -> None:
        reply = Header(FrameKind.ABORTED, header.reservation_id, header.fence)
        self._reply(reply, pack_reason(reason))

    def _payload(self, header: Header) -> bytes:
        return self._read(header.payload_bytes)

    def _read(self, num_bytes: int) -> bytes:
        content = bytearray(num_bytes)
        receive_all(self._stream, [memoryview(content)], self._clock)
        return bytes(content)

    def _read_header(self, *, limit_s: float) -> Header:
        receive_all(self._stream, [self._header], self._clock, limit_s=limit_s)
        return unpack_header(self._header)

    def _reply(self, header: Header, payload: bytes) -> None:
        full = replace(header, payload_bytes=len(payload))
        send_all(self._stream, [memoryview(full.pack()), memoryview(payload)], self._clock)
