"""How the two ends of a link agree that payloads travel beside it.

::

    prefill  PAIR {transport, …} ──►  decode
             ◄── PAIRED {…}  or  {refused: why}

On a link that has been greeted, before its first OPEN. What the dots are is the transport's own.
"""

from __future__ import annotations

from pdserve.clock import Clock
from pdserve.errors import PeerError, ProtocolViolation
from pdserve.kvcache.layout import KVLayout
from pdserve.transfer.control import receive_frame, send_frame
from pdserve.transfer.frame import FrameKind, Header, pack_json, unpack_json
from pdserve.transfer.stream import ByteStream


class PairRefused(PeerError):
    """One side cannot or will not; nothing is broken."""

    label = "pair_refused"


def request_pair(
    stream: ByteStream, transport: str, content: dict[str, object], clock: Clock, *, limit_s: float
) -> dict[str, object]:
    """Decode's answer. Raises ``PairRefused``."""
    request = pack_json({"transport": transport, **content})
    send_frame(stream, Header(FrameKind.PAIR), request, clock)
    header, payload = receive_frame(stream, clock, limit_s=limit_s)
    if header.kind is not FrameKind.PAIRED:
        raise ProtocolViolation(f"expected PAIRED, not {header.kind.name}")
    answer = unpack_json(payload)
    if "refused" in answer:
        raise PairRefused(f"{transport}: {answer['refused']}")
    return answer


def answer_pair(stream: ByteStream, content: dict[str, object], clock: Clock) -> None:
    send_frame(stream, Header(FrameKind.PAIRED), pack_json(content), clock)


def payload_room(layout: KVLayout, num_bytes: int) -> int:
    """``num_bytes``, as the peer names it. Raises ``PairRefused`` when nothing of ours would fit."""
    if num_bytes < layout.block_bytes // layout.num_layers:
        raise PairRefused(f"a layer of a block does not fit into {num_bytes} bytes")
    return num_bytes


def text(content: dict[str, object], key: str) -> str:
    """Raises ``ProtocolViolation``."""
    value = content.get(key)
    if not isinstance(value, str):
        raise ProtocolViolation(f"{key} is {value!r}, not a string")
    return value


def data(content: dict[str, object], key: str) -> bytes:
    """Bytes in hexadecimal. Raises ``ProtocolViolation``."""
    try:
        return bytes.fromhex(text(content, key))
    except ValueError as error:
        raise ProtocolViolation(f"{key}: {error}") from error


def number(content: dict[str, object], key: str) -> int:
    """Raises ``ProtocolViolation``."""
    value = content.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ProtocolViolation(f"{key} is {value!r}, not an integer")
    return value
