"""KV over a socket of its own: blocking, gathered and scattered by the system, one copy each side."""

from __future__ import annotations

import logging
import socket
import threading
from contextlib import suppress

from pdserve.clock import Clock
from pdserve.errors import ConfigError
from pdserve.transfer.landing import LandingTable
from pdserve.transfer.payload import ReceiverOpeners
from pdserve.transfer.push import Endpoint
from pdserve.transfer.receiver import serve_link
from pdserve.transfer.socket_stream import SocketStream
from pdserve.transfer.stream import LinkLost

logger = logging.getLogger(__name__)

NAME = "tcp"


def connect(endpoint: Endpoint, limit_s: float) -> SocketStream:
    host, _, port = endpoint.address.rpartition(":")
    try:
        return _stream(socket.create_connection((host, int(port)), timeout=limit_s))
    except OSError as error:
        raise LinkLost(f"tcp: cannot connect to {endpoint.address}: {error}") from error


def _stream(connection: socket.socket) -> SocketStream:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return SocketStream(connection)


class TcpListener:
    """Accepts links on its own thread and serves each on one more."""

    def __init__(
        self,
        table: LandingTable,
        *,
        host: str,
        port: int,
        clock: Clock,
        payload_openers: ReceiverOpeners | None = None,
    ) -> None:
        """Raises ``ConfigError`` when the address cannot be had."""
        self._table = table
        self._clock = clock
        self._payload_openers = payload_openers
        self._streams: set[SocketStream] = set()
        self._lock = threading.Lock()
        try:
            self._socket = socket.create_server((host, port), backlog=64)
        except OSError as error:
            raise ConfigError(f"cannot listen for KV on {host}:{port}: {error}") from error
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="kv-accept", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        with suppress(OSError):  # the accept thread may not be in it
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            stream.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._socket.accept()
            except OSError:
                return  # closed
            logger.info("link_accepted transport=tcp peer=%s", address)
            stream = _stream(connection)
            threading.Thread(target=self._serve, args=(stream,), name="kv-receive", daemon=True).start()

    def _serve(self, stream: SocketStream) -> None:
        with self._lock:
            self._streams.add(stream)
        serve_link(stream, self._table, self._clock, self._payload_openers)
        with self._lock:
            self._streams.discard(stream)
