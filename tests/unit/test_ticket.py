from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import Unauthorized
from pdserve.rpc.ticket import TICKET_BYTES, sign_ticket, verify_ticket

SECRET = b"a shared secret"


@dataclass(frozen=True)
class Granted:
    reservation_id: int = 7
    fence: int = 9
    decode_incarnation: int = 2**63 + 1


def signed(grant: Granted, *, secret: bytes = SECRET) -> bytes:
    return sign_ticket(secret, request_id="r-0-0", reservation=grant, expires_unix_s=1_000)


def verify(ticket: bytes, grant: Granted, *, request_id: str = "r-0-0", now_unix_s: float = 999) -> None:
    verify_ticket(ticket, secret=SECRET, request_id=request_id, reservation=grant, now_unix_s=now_unix_s)


def test_a_ticket_is_good_for_the_grant_it_was_signed_for() -> None:
    verify(signed(Granted()), Granted())


@pytest.mark.parametrize("field", ["reservation_id", "fence", "decode_incarnation"])
def test_a_ticket_is_worthless_for_any_other_grant(field: str) -> None:
    other = replace(Granted(), **{field: 8})
    with pytest.raises(Unauthorized, match="another reservation"):
        verify(signed(Granted()), other)


def test_a_ticket_is_worthless_for_another_request() -> None:
    with pytest.raises(Unauthorized, match="another reservation"):
        verify(signed(Granted()), Granted(), request_id="r-0-1")


def test_a_ticket_ends() -> None:
    with pytest.raises(Unauthorized, match="expired"):
        verify(signed(Granted()), Granted(), now_unix_s=1_001)


def test_another_secret_signs_nothing() -> None:
    with pytest.raises(Unauthorized, match="share one secret"):
        verify(signed(Granted(), secret=b"guess"), Granted())


@given(position=st.integers(0, TICKET_BYTES - 1), bit=st.integers(0, 7))
def test_no_bit_of_a_ticket_can_be_changed(position: int, bit: int) -> None:
    forged = bytearray(signed(Granted()))
    forged[position] ^= 1 << bit
    with pytest.raises(Unauthorized):
        verify(bytes(forged), Granted())


def test_a_ticket_of_another_length_is_refused_before_it_is_read() -> None:
    with pytest.raises(Unauthorized, match="bytes"):
        verify(signed(Granted())[:-1], Granted())
