"""KV through shared memory, between two processes of one host.

::

    prefill ── connect ──► unix socket, named but in no file system ──► decode
               its pool and its page of holds, as descriptors that cannot write
               frames: PAIR, OPEN, DATA with an offer …  ◄── replies

Prefill's pool lies in memory that decode maps; decode copies, see ``shm_payloads``. Where the pool is
not in such memory the payloads are in the stream, which is still faster than tcp.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from pdserve.clock import Clock
from pdserve.errors import ConfigError, PeerError, ProtocolViolation
from pdserve.kvcache.segment import KVBytes
from pdserve.kvcache.shared_memory import SharedMemory
from pdserve.transfer.device.pairing import answer_pair, request_pair
from pdserve.transfer.holds import Holds, PeerHolds
from pdserve.transfer.landing import LandingTable
from pdserve.transfer.payload import PayloadReceiver, PayloadSender, SenderOpeners
from pdserve.transfer.push import Endpoint
from pdserve.transfer.receiver import serve_link
from pdserve.transfer.shm_payloads import SharedPayloadReceiver, SharedPayloadSender
from pdserve.transfer.socket_stream import SocketStream
from pdserve.transfer.stream import ByteStream, LinkLost

logger = logging.getLogger(__name__)

NAME = "shm"
_HELLO = b"pdserve-shm-2"
_CREDENTIALS = struct.Struct("iII")  # struct ucred: process, user, group
_NUM_FDS = 2
# The system gives a socket as much as it allows, which is a few times the default.
_SEND_BUFFER_BYTES = 4 << 20


class SharedMemoryWay:
    """Prefill's side: one for a pool, whatever number of peers copy from it."""

    def __init__(self, kv: KVBytes, clock: Clock) -> None:
        self._kv = kv
        self._clock = clock
        self.senders: SenderOpeners = {} if kv.shared_memory is None else {NAME: self._open_sender}
        self._holds = Holds()

    def connect(self, endpoint: Endpoint, limit_s: float) -> SocketStream:
        """Raises ``LinkLost``: on another host there is no such socket."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
            connection.settimeout(limit_s)
            connection.connect(_abstract(endpoint.address))
            self._introduce(connection)
        except OSError as error:
            connection.close()
            raise LinkLost(f"shm: cannot connect to {endpoint.address}: {error}") from error
        return SocketStream(connection)

    def _open_sender(self, stream: ByteStream, limit_s: float) -> PayloadSender:
        """Raises ``PeerError``."""
        request_pair(stream, NAME, {}, self._clock, limit_s=limit_s)
        return SharedPayloadSender(stream, self._kv, self._holds, self._clock)

    def _introduce(self, connection: socket.socket) -> None:
        if self._kv.shared_memory is None:
            connection.sendall(_HELLO)
            return
        fds = [memory.open_for_peer() for memory in (self._kv.shared_memory, self._holds.memory)]
        try:
            socket.send_fds(connection, [_HELLO], fds)
        finally:
            for fd in fds:
                os.close(fd)


@dataclass(frozen=True, slots=True)
class _PeerPool:
    """What decode sees of prefill's memory."""

    memory: SharedMemory
    holds: PeerHolds


def _abstract(address: str) -> str:
    """``@name``, as tools write it, is a socket of that name in no file system."""
    return "\0" + address.removeprefix("@")


class SharedMemoryListener:
    """Accepts links from processes of the same user.

    The socket has a name but no file, so that nothing is left behind by a process that is killed.
    """

    def __init__(self, table: LandingTable, *, clock: Clock) -> None:
        """Raises ``ConfigError`` when there can be no such socket."""
        self._table = table
        self._clock = clock
        self._streams: set[SocketStream] = set()
        self._lock = threading.Lock()
        try:
            self.address = f"@pdserve-kv-{secrets.token_hex(16)}"
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.bind(_abstract(self.address))
            self._socket.listen(64)
        except OSError as error:
            raise ConfigError(f"cannot make a socket for shared memory links: {error}") from error
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
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(connection,), name="kv-receive", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            pool = _hear_introduction(connection)
        except PeerError as error:
            logger.info("link_refused transport=shm detail=%s", error)
            connection.close()
            return
        logger.info("link_accepted transport=shm sees_pool=%s", pool is not None)
        stream = SocketStream(connection)
        with self._lock:
            self._streams.add(stream)
        openers = {NAME: partial(_open_receiver, pool, self._table.kv, self._clock)} if pool else {}
        serve_link(stream, self._table, self._clock, openers)
        with self._lock:
            self._streams.discard(stream)


def _open_receiver(
    pool: _PeerPool, kv: KVBytes, clock: Clock, stream: ByteStream, request: dict[str, object]
) -> PayloadReceiver:
    """Answers PAIR."""
    del request
    answer_pair(stream, {}, clock)
    return SharedPayloadReceiver(stream, kv, pool.memory, pool.holds, clock)


def _hear_introduction(connection: socket.socket) -> _PeerPool | None:
    """None when the peer's pool cannot be seen. Raises ``PeerError``."""
    connection.settimeout(5.0)
    try:
        user_id = _CREDENTIALS.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )[1]
        if user_id != os.geteuid():
            raise ProtocolViolation(f"shm: it belongs to user {user_id}")
        message, fds, _, _ = socket.recv_fds(connection, len(_HELLO), _NUM_FDS, socket.MSG_CMSG_CLOEXEC)
    except OSError as error:
        raise LinkLost(f"shm: {error}") from error
    memories = [SharedMemory.of_peer(fd) for fd in fds]
    if message != _HELLO or len(memories) not in (0, _NUM_FDS):
        raise ProtocolViolation(f"shm: not an introduction: {message!r} with {len(memories)} descriptors")
    return _PeerPool(memories[0], PeerHolds(memories[1])) if memories else None
