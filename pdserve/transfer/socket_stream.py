"""A connected stream socket as a byte stream, and how it is closed while threads are inside.

The socket itself never blocks: its two directions wait for different times, each on a poll of its
own. A time-out set on the socket would be shared by both, and one could leave the other waiting
for ever.
"""

from __future__ import annotations

import math
import select
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from pdserve.transfer.stream import LinkLost


class Tenancy:
    """Who is inside something that is to be freed: after ``end`` the last to leave frees it.

    A file descriptor that is closed under a waiting thread may be somebody else's a moment later.
    """

    def __init__(self, free: Callable[[], None]) -> None:
        self._free = free
        self._lock = threading.Lock()
        self._num_inside = 0
        self._has_ended = False

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Raises ``LinkLost`` after the end."""
        with self._lock:
            if self._has_ended:
                raise LinkLost("the link is closed")
            self._num_inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_inside -= 1
                self._free_if_left()

    def end(self, wake: Callable[[], None]) -> None:
        """Idempotent. ``wake`` gets out those who wait inside, before anything is freed."""
        with self._lock:
            if not self._has_ended:
                self._has_ended = True
                wake()
                self._free_if_left()

    def _free_if_left(self) -> None:
        if self._has_ended and not self._num_inside:
            self._free()


class SocketStream:
    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(connection, select.POLLIN)
        self._writable.register(connection, select.POLLOUT)
        self._tenancy = Tenancy(connection.close)

    def send_some(self, views: Sequence[memoryview], wait_s: float) -> int:
        return self._move(self._socket.sendmsg, views, self._writable, wait_s)

    def receive_some(self, views: Sequence[memoryview], wait_s: float) -> int:
        return self._move(self._receive, views, self._readable, wait_s)

    def close(self) -> None:
        self._tenancy.end(self.shut_down)

    def shut_down(self) -> None:
        """Wakes whoever waits in it, on both sides."""
        with suppress(OSError):  # it may not be connected any more
            self._socket.shutdown(socket.SHUT_RDWR)

    def _move(
        self,
        move: Callable[[Sequence[memoryview]], int],
        views: Sequence[memoryview],
        readiness: select.poll,
        wait_s: float,
    ) -> int:
        with self._tenancy.inside():
            moved = _try(move, views)
            if moved is None:
                readiness.poll(None if math.isinf(wait_s) else wait_s * 1000)
                moved = _try(move, views)
            return moved or 0

    def _receive(self, views: Sequence[memoryview]) -> int:
        received = self._socket.recvmsg_into(views)[0]
        if received == 0:
            raise LinkLost("the peer closed the connection")
        return received


def _try(move: Callable[[Sequence[memoryview]], int], views: Sequence[memoryview]) -> int | None:
    """None when the socket is not ready."""
    try:
        return move(views)
    except BlockingIOError:
        return None
    except OSError as error:
        raise LinkLost(str(error)) from error
