"""The address that others reach this host by, for a worker that listens on all of them.

Not the host's name: copies of one container may share it, and then it stands for any of them.
"""

from __future__ import annotations

import socket

from pdserve.errors import ConfigError

WILDCARD_HOSTS = ("0.0.0.0", "::", "[::]")
# Reserved for documentation: routed like any other address, and nothing is sent to it.
_FAR_AWAY = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}


def reachable_host(host: str, advertise_host: str | None) -> str:
    """What is advertised, or the address listened on. Raises ``ConfigError`` when it cannot be told."""
    if advertise_host is not None:
        return advertise_host
    if host not in WILDCARD_HOSTS:
        return host
    found = _by_route(socket.AF_INET) or _by_name() or _by_route(socket.AF_INET6)
    if found is None:
        raise ConfigError(f"listening on {host}, but no address others reach it by: set advertise_host")
    return found


def _by_route(family: socket.AddressFamily) -> str | None:
    """The address that packets to far away leave from."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((_FAR_AWAY[family], 9))
            address = str(probe.getsockname()[0])
    except OSError:
        return None
    return f"[{address}]" if family is socket.AF_INET6 else address


def _by_name() -> str | None:
    """For networks without a way out: the container's own entry in its hosts file."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET, socket.SOCK_STREAM)
    except socket.gaierror:
        return None
    addresses = [str(where[0]) for *_, where in found]
    return next((address for address in addresses if not address.startswith("127.")), None)
