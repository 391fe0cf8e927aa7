"""Whole frames with small payloads: everything on a link but DATA."""

from __future__ import annotations

from dataclasses import replace

from pdserve.clock import Clock
from pdserve.transfer.frame import HEADER_BYTES, Header, unpack_header
from pdserve.transfer.stream import NO_PROGRESS_LIMIT_S, ByteStream, receive_all, send_all


def send_frame(stream: ByteStream, header: Header, payload: bytes, clock: Clock) -> None:
    full = replace(header, payload_bytes=len(payload))
    send_all(stream, [memoryview(full.pack()), memoryview(payload)], clock)


def receive_frame(
    stream: ByteStream, clock: Clock, *, limit_s: float = NO_PROGRESS_LIMIT_S
) -> tuple[Header, bytes]:
    """``limit_s`` bounds the wait for the header; infinite for a link that may be idle."""
    head = memoryview(bytearray(HEADER_BYTES))
    receive_all(stream, [head], clock, limit_s=limit_s)
    header = unpack_header(head)
    payload = bytearray(header.payload_bytes)
    receive_all(stream, [memoryview(payload)], clock)
    return header, bytes(payload)
