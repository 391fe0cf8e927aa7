"""What a worker target in the settings stands for: ``host:port``, the host a name or an address.

A name stands for all its addresses, as a compose service or a headless service of Kubernetes
has one for each replica. Who asks, and how often, is decided in ``pool``.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from pdserve.errors import ConfigError

LOOKUP_LIMIT_S = 2.0


@dataclass(frozen=True, slots=True)
class Target:
    host: str
    port: int

    @property
    def is_address(self) -> bool:
        """Whether it stands for itself alone, for good."""
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            return False
        return True

    def __str__(self) -> str:
        return address_of(self.host, self.port)


# The addresses of a name, none when nobody has it; raises ``LookupFailed``.
Resolve = Callable[[Target], Awaitable[list[str]]]


class LookupFailed(Exception):
    """Nobody could say: what was known before still counts."""


def parse_target(text: str) -> Target:
    """Raises ``ConfigError``. An IPv6 address stands in brackets."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) <= 65535):
        raise ConfigError(f"worker {text!r} is not host:port")
    return Target(host, int(port))


def address_of(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def resolve(target: Target) -> list[str]:
    """Addresses of one family, IPv4 if there are any: a worker with both counts once."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(LOOKUP_LIMIT_S):
            found = await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in (socket.EAI_NONAME, socket.EAI_NODATA):
            return []
        raise LookupFailed(f"{target.host}: {error.strerror}") from error
    except TimeoutError as error:
        raise LookupFailed(f"{target.host}: no answer within {LOOKUP_LIMIT_S:g} s") from error
    by_family: dict[int, set[str]] = {}
    for family, _, _, _, where in found:
        by_family.setdefault(family, set()).add(address_of(str(where[0]), target.port))
    return sorted(by_family.get(socket.AF_INET) or by_family.get(socket.AF_INET6) or ())
