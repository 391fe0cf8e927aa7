"""What a worker calls itself towards its peers."""

from __future__ import annotations

import ipaddress
import socket

import pytest

from pdserve.errors import ConfigError
from pdserve.worker import own_address
from pdserve.worker.own_address import reachable_host


def test_an_address_that_is_listened_on_is_what_others_use() -> None:
    assert reachable_host("10.1.2.3", None) == "10.1.2.3"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3"])
def test_what_is_advertised_goes_before_all(host: str) -> None:
    assert reachable_host(host, "decode-0.example") == "decode-0.example"


def test_a_wildcard_stands_for_an_address_of_this_host_and_never_for_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(own_address, "_by_route", lambda family: "10.89.0.7")
    assert reachable_host("0.0.0.0", None) == "10.89.0.7"


def test_the_address_found_by_route_can_be_listened_on() -> None:
    address = own_address._by_route(socket.AF_INET)
    if address is None:
        pytest.skip("this machine has no route to other networks")
    assert not ipaddress.ip_address(address).is_unspecified
    with socket.create_server((address, 0)):
        pass


def test_without_any_address_the_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_address, "_by_route", lambda family: None)
    monkeypatch.setattr(own_address, "_by_name", lambda: None)
    with pytest.raises(ConfigError, match="advertise_host"):
        reachable_host("0.0.0.0", None)
