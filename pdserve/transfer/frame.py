"""The frames of a link: a fixed header, then a payload whose size is known and bounded. Pure.

Checksums are xxh3-64. A header ends with its own. A DATA payload is followed by one: behind, so that
both ends can compute it while the bytes move. A commit's digest covers these and the first token.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from enum import IntEnum

import xxhash

from pdserve.errors import ProtocolViolation
from pdserve.kvcache.segment import Segment, WireDtype, WireOrder

MAGIC = b"KV"
VERSION = 3
CHECKSUM = struct.Struct("<Q")
CHECKSUM_BYTES = CHECKSUM.size
_FIELDS = struct.Struct("<2sBBBBxxQQIHHHHIIQ4x")
HEADER_BYTES = _FIELDS.size + CHECKSUM_BYTES
MAX_CONTROL_BYTES = 16 << 10
MAX_DATA_BYTES = 1 << 30
MAX_REASON_BYTES = 256
_COMMIT = struct.Struct("<IIQQ")


class FrameKind(IntEnum):
    HELLO = 1
    HELLO_REPLY = 2
    OPEN = 3
    DATA = 4
    COMMIT = 5
    ABORT = 6
    SEALED = 7
    ABORTED = 8
    PAIR = 9
    PAIRED = 10
    TAKEN = 11


NO_SEGMENT = Segment(0, 0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Header:
    """``sequence`` counts the DATA frames of a reservation from 0."""

    kind: FrameKind
    reservation_id: int = 0
    fence: int = 0
    payload_bytes: int = 0
    sequence: int = 0
    segment: Segment = NO_SEGMENT
    wire_order: WireOrder = WireOrder.TOKEN
    wire_dtype: WireDtype = WireDtype.SAME

    def pack(self) -> bytes:
        segment = self.segment
        fields = _FIELDS.pack(
            MAGIC,
            VERSION,
            self.kind,
            self.wire_order,
            self.wire_dtype,
            self.reservation_id,
            self.fence,
            self.sequence,
            segment.layer_begin,
            segment.num_layers,
            segment.head_begin,
            segment.num_heads,
            segment.token_begin,
            segment.num_tokens,
            self.payload_bytes,
        )
        return fields + CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))


def unpack_header(data: bytes | bytearray | memoryview) -> Header:
    """Raises ``ProtocolViolation``, before anything is allocated for the payload."""
    magic, version, kind, order, dtype, reservation_id, fence, sequence, *numbers = _FIELDS.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise ProtocolViolation(f"not a KV frame of version {VERSION}: {magic!r} version {version}")
    (checksum,) = CHECKSUM.unpack_from(data, _FIELDS.size)
    if checksum != xxhash.xxh3_64_intdigest(data[: _FIELDS.size]):
        raise ProtocolViolation("the checksum of a header is wrong")
    try:
        kind, wire_order, wire_dtype = FrameKind(kind), WireOrder(order), WireDtype(dtype)
    except ValueError as error:
        raise ProtocolViolation(str(error)) from error
    *rectangle, payload_bytes = numbers
    limit = MAX_DATA_BYTES if kind is FrameKind.DATA else MAX_CONTROL_BYTES
    if payload_bytes > limit:
        raise ProtocolViolation(f"a {kind.name} frame of {payload_bytes} bytes is over the limit of {limit}")
    segment = Segment(*rectangle)
    return Header(kind, reservation_id, fence, payload_bytes, sequence, segment, wire_order, wire_dtype)


@dataclass(frozen=True, slots=True)
class Commit:
    """What the sender claims to have sent; ``digest``: see ``commit_digest``."""

    num_segments: int
    first_token_id: int
    num_bytes: int
    digest: int

    def pack(self) -> bytes:
        return _COMMIT.pack(self.num_segments, self.first_token_id, self.num_bytes, self.digest)

    @classmethod
    def unpack(cls, payload: bytes) -> Commit:
        if len(payload) != _COMMIT.size:
            raise ProtocolViolation(f"a commit has {_COMMIT.size} bytes, this one {len(payload)}")
        return cls(*_COMMIT.unpack(payload))


def commit_digest(checksums: xxhash.xxh3_64, first_token_id: int) -> int:
    """Of all DATA checksums, in order, and of the first token, which decoding starts from."""
    whole = checksums.copy()
    whole.update(first_token_id.to_bytes(4, "little"))
    return whole.intdigest()


def pack_reason(reason: str) -> bytes:
    return reason.encode()[:MAX_REASON_BYTES]


def unpack_reason(payload: bytes) -> str:
    return payload[:MAX_REASON_BYTES].decode(errors="replace")


def pack_json(content: dict[str, object]) -> bytes:
    return json.dumps(content).encode()


def unpack_json(payload: bytes) -> dict[str, object]:
    try:
        content = json.loads(payload)
    except ValueError as error:
        raise ProtocolViolation(f"not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ProtocolViolation("not a JSON object")
    return content
