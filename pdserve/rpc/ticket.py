"""Tickets: the router's signed leave for one prefill worker to fill one reservation. Pure.

A ticket names what decode granted (request, reservation, fence, incarnation) and when it
ends. The decode worker compares it with its own record, so a ticket is worth nothing for
another reservation, after a restart, or once the fence has moved on. The expiry is wall
clock and wide (clocks of two hosts differ); the lease is what bounds time closely.

    version u8 | expires_unix_s u64 | reservation_id u64 | fence u64 | incarnation u64 |
    blake2b-128 of request_id | HMAC-SHA256 of all before
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Protocol

from pdserve.errors import Unauthorized

_BODY = struct.Struct("<BQQQQ16s")
_MAC_BYTES = 32
_VERSION = 1
TICKET_BYTES = _BODY.size + _MAC_BYTES


class Grant(Protocol):
    """What a ticket is about: the ``Reservation`` message has these fields."""

    @property
    def reservation_id(self) -> int: ...
    @property
    def fence(self) -> int: ...
    @property
    def decode_incarnation(self) -> int: ...


def sign_ticket(secret: bytes, *, request_id: str, reservation: Grant, expires_unix_s: int) -> bytes:
    body = _BODY.pack(
        _VERSION,
        expires_unix_s,
        reservation.reservation_id,
        reservation.fence,
        reservation.decode_incarnation,
        _digest(request_id),
    )
    return body + _mac(secret, body)


def verify_ticket(
    ticket: bytes, *, secret: bytes, request_id: str, reservation: Grant, now_unix_s: float
) -> None:
    """Raises ``Unauthorized`` unless ``ticket`` was signed for exactly this grant and has not expired."""
    if len(ticket) != TICKET_BYTES:
        raise Unauthorized(f"a ticket has {TICKET_BYTES} bytes, this one {len(ticket)}")
    body, mac = ticket[: _BODY.size], ticket[_BODY.size :]
    if not hmac.compare_digest(mac, _mac(secret, body)):
        raise Unauthorized("the ticket's signature is wrong: do all parts share one secret?")
    version, expires_unix_s, *granted, digest = _BODY.unpack(body)
    if version != _VERSION:
        raise Unauthorized(f"ticket version {version}, expected {_VERSION}")
    expected = [reservation.reservation_id, reservation.fence, reservation.decode_incarnation]
    if granted != expected or digest != _digest(request_id):
        raise Unauthorized("the ticket was signed for another reservation")
    if now_unix_s > expires_unix_s:
        raise Unauthorized(
            f"the ticket expired {now_unix_s - expires_unix_s:.0f} s ago; are the clocks in step?"
        )


def _digest(request_id: str) -> bytes:
    return hashlib.blake2b(request_id.encode(), digest_size=16).digest()


def _mac(secret: bytes, body: bytes) -> bytes:
    return hmac.new(secret, b"ticket\0" + body, hashlib.sha256).digest()
