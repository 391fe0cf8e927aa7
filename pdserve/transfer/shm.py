"""KV through shared memory, between two processes of one host.

::

    prefill                                            decode
    pool ──copy──► ring (memfd, populated at start) ──copy──► pool
             └─ "filled" eventfd ──►   ◄── "emptied" eventfd ─┘
           ◄────────── replies and end of life: a unix socket ──────────

The sender makes ring and doorbells and passes them once over the socket. The ring is small, so
that what one side wrote is still in the cache when the other reads it. Nobody polls: a side
that has to wait sleeps on its doorbell and on the socket, whose end says that the peer is gone.

The counters in the ring are 8-byte aligned and written by one side each; a system call (the
doorbell) lies between a write of the counter and the peer's wake-up.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import secrets
import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from pdserve.clock import Clock
from pdserve.errors import ConfigError
from pdserve.transfer.landing import LandingTable
from pdserve.transfer.push import Endpoint
from pdserve.transfer.receiver import serve_link
from pdserve.transfer.socket_stream import SocketStream, Tenancy
from pdserve.transfer.stream import LinkLost

logger = logging.getLogger(__name__)

NAME = "shm"
# Measured: 1 MiB stays in the second-level cache, which 4 MiB and more do not.
RING_BYTES = 1 << 20
# How much one call moves: the peer works on one part while we copy the next.
PART_BYTES = 256 << 10
_COUNTERS_BYTES = mmap.PAGESIZE
_HELLO = struct.Struct("<Q")
_CREDENTIALS = struct.Struct("iII")  # struct ucred: process, user, group
_NUM_FDS = 3


class _Ring:
    """Bytes one way through mapped memory. ``head`` is written by the sender, ``tail`` by the receiver."""

    def __init__(self, memory_fd: int, filled_fd: int, emptied_fd: int, num_bytes: int) -> None:
        self._map = mmap.mmap(memory_fd, _COUNTERS_BYTES + num_bytes)
        self._whole = memoryview(self._map)
        self._counters = self._whole[:_COUNTERS_BYTES].cast("Q")
        # On cache lines of their own: the two sides write them all the time.
        self._head = self._counters[0:1]
        self._tail = self._counters[16:17]
        self._data = self._whole[_COUNTERS_BYTES:]
        self._num_bytes = num_bytes
        self.filled_fd = filled_fd
        self.emptied_fd = emptied_fd
        os.close(memory_fd)

    @property
    def num_filled(self) -> int:
        """Raises ``LinkLost`` for counters that no sound peer writes."""
        filled = self._head[0] - self._tail[0]
        if not 0 <= filled <= self._num_bytes:
            raise LinkLost(f"shm: the ring claims {filled} of {self._num_bytes} bytes")
        return filled

    @property
    def num_empty(self) -> int:
        return self._num_bytes - self.num_filled

    def put(self, views: Sequence[memoryview]) -> int:
        """Copies what there is room for, rings, and says how much that was."""
        begin = self._head[0]
        room = min(self.num_empty, PART_BYTES)
        moved = 0
        for view in views:
            moved += self._copy_in(view[: room - moved], begin + moved)
            if moved == room:
                break
        if moved:
            self._head[0] = begin + moved
            os.eventfd_write(self.filled_fd, 1)
        return moved

    def take(self, views: Sequence[memoryview]) -> int:
        begin = self._tail[0]
        available = min(self.num_filled, PART_BYTES)
        moved = 0
        for view in views:
            moved += self._copy_out(view[: available - moved], begin + moved)
            if moved == available:
                break
        if moved:
            self._tail[0] = begin + moved
            os.eventfd_write(self.emptied_fd, 1)
        return moved

    def _copy_in(self, view: memoryview, at: int) -> int:
        at %= self._num_bytes
        first = min(len(view), self._num_bytes - at)
        self._data[at : at + first] = view[:first]
        self._data[: len(view) - first] = view[first:]
        return len(view)

    def _copy_out(self, view: memoryview, at: int) -> int:
        at %= self._num_bytes
        first = min(len(view), self._num_bytes - at)
        view[:first] = self._data[at : at + first]
        view[first:] = self._data[: len(view) - first]
        return len(view)

    def close(self) -> None:
        for view in (self._head, self._tail, self._counters, self._data, self._whole):
            view.release()
        self._map.close()
        os.close(self.filled_fd)
        os.close(self.emptied_fd)


class _SharedMemoryStream:
    """What both ends have: the ring, the socket, and how they wait for the ring."""

    def __init__(self, ring: _Ring, connection: socket.socket, doorbell_fd: int) -> None:
        self._ring = ring
        self._socket = SocketStream(connection)
        self._doorbell_fd = doorbell_fd
        self._events = select.poll()
        self._events.register(doorbell_fd, select.POLLIN)
        self._events.register(connection, select.POLLRDHUP)
        self._tenancy = Tenancy(self._free)

    def close(self) -> None:
        self._tenancy.end(self._socket.shut_down)

    def _free(self) -> None:
        self._socket.close()
        self._ring.close()

    def _move(
        self, move: Callable[[Sequence[memoryview]], int], views: Sequence[memoryview], wait_s: float
    ) -> int:
        with self._tenancy.inside():
            moved = move(views)
            if not moved:
                self._wait(wait_s)
                moved = move(views)
            return moved

    def _wait(self, wait_s: float) -> None:
        """Until the doorbell rings or the time is up. Raises ``LinkLost`` when the peer is gone."""
        events = dict(self._events.poll(None if math.isinf(wait_s) else wait_s * 1000))
        if self._doorbell_fd in events:
            os.eventfd_read(self._doorbell_fd)
        elif events:
            raise LinkLost("the peer is gone")


class SenderStream(_SharedMemoryStream):
    """Prefill's end: data into the ring, replies from the socket."""

    def __init__(self, ring: _Ring, connection: socket.socket) -> None:
        super().__init__(ring, connection, ring.emptied_fd)

    def send_some(self, views: Sequence[memoryview], wait_s: float) -> int:
        return self._move(self._ring.put, views, wait_s)

    def receive_some(self, views: Sequence[memoryview], wait_s: float) -> int:
        with self._tenancy.inside():
            return self._socket.receive_some(views, wait_s)


class ReceiverStream(_SharedMemoryStream):
    """Decode's end: data from the ring, replies into the socket."""

    def __init__(self, ring: _Ring, connection: socket.socket) -> None:
        super().__init__(ring, connection, ring.filled_fd)

    def send_some(self, views: Sequence[memoryview], wait_s: float) -> int:
        with self._tenancy.inside():
            return self._socket.send_some(views, wait_s)

    def receive_some(self, views: Sequence[memoryview], wait_s: float) -> int:
        return self._move(self._ring.take, views, wait_s)


def connect(endpoint: Endpoint, limit_s: float) -> SenderStream:
    """Raises ``LinkLost``: on another host there is no such socket."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(limit_s)
        connection.connect(_abstract(endpoint.address))
        ring = _send_new_ring(connection)
    except OSError as error:
        connection.close()
        raise LinkLost(f"shm: cannot connect to {endpoint.address}: {error}") from error
    return SenderStream(ring, connection)


def _send_new_ring(connection: socket.socket) -> _Ring:
    memory_fd = os.memfd_create("pdserve-kv", os.MFD_CLOEXEC)
    os.posix_fallocate(memory_fd, 0, _COUNTERS_BYTES + RING_BYTES)  # its pages are there from now on
    filled_fd, emptied_fd = (os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(2))
    socket.send_fds(connection, [_HELLO.pack(RING_BYTES)], [memory_fd, filled_fd, emptied_fd])
    return _Ring(memory_fd, filled_fd, emptied_fd, RING_BYTES)


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
        self._streams: set[ReceiverStream] = set()
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
        stream = _accept_ring(connection) if _is_same_user(connection) else None
        if stream is None:
            connection.close()
            return
        logger.info("link_accepted transport=shm")
        with self._lock:
            self._streams.add(stream)
        serve_link(stream, self._table, self._clock)
        with self._lock:
            self._streams.discard(stream)


def _is_same_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user_id, _ = _CREDENTIALS.unpack(credentials)
    return bool(user_id == os.geteuid())


def _accept_ring(connection: socket.socket) -> ReceiverStream | None:
    """None for a peer that does not offer a ring of the size we know."""
    connection.settimeout(5.0)
    try:
        message, fds, _, _ = socket.recv_fds(connection, _HELLO.size, _NUM_FDS)
    except OSError:
        return None
    is_sound = len(fds) == _NUM_FDS and message == _HELLO.pack(RING_BYTES)
    if not is_sound or os.fstat(fds[0]).st_size != _COUNTERS_BYTES + RING_BYTES:
        for fd in fds:
            os.close(fd)
        return None
    memory_fd, filled_fd, emptied_fd = fds
    return ReceiverStream(_Ring(memory_fd, filled_fd, emptied_fd, RING_BYTES), connection)
