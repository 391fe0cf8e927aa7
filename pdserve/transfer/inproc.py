"""A link inside one process, for tests and for workers that share one: bounded, like a socket's buffers."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

from pdserve.clock import Clock
from pdserve.transfer.landing import LandingTable
from pdserve.transfer.push import Endpoint
from pdserve.transfer.receiver import serve_link
from pdserve.transfer.stream import LinkLost

NAME = "inproc"
PIPE_BYTES = 1 << 20


class _Pipe:
    """Bytes one way."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, views: Sequence[memoryview], wait_s: float) -> int:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._bytes) < PIPE_BYTES, _timeout(wait_s))
            if self._closed:
                raise LinkLost("inproc: closed")
            taken = 0
            for view in views:
                room = PIPE_BYTES - len(self._bytes)
                self._bytes += view[:room]
                taken += min(room, len(view))
            self._changed.notify_all()
            return taken

    def take(self, views: Sequence[memoryview], wait_s: float) -> int:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._bytes, _timeout(wait_s))
            if not self._bytes and self._closed:
                raise LinkLost("inproc: closed")
            taken = 0
            for view in views:
                part = self._bytes[taken : taken + len(view)]
                view[: len(part)] = part
                taken += len(part)
            del self._bytes[:taken]
            self._changed.notify_all()
            return taken

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class InprocStream:
    def __init__(self, outgoing: _Pipe, incoming: _Pipe) -> None:
        self._outgoing = outgoing
        self._incoming = incoming

    def send_some(self, views: Sequence[memoryview], wait_s: float) -> int:
        return self._outgoing.put(views, wait_s)

    def receive_some(self, views: Sequence[memoryview], wait_s: float) -> int:
        return self._incoming.take(views, wait_s)

    def close(self) -> None:
        self._outgoing.close()
        self._incoming.close()


def stream_pair() -> tuple[InprocStream, InprocStream]:
    there, back = _Pipe(), _Pipe()
    return InprocStream(there, back), InprocStream(back, there)


class InprocListener:
    """``connect`` goes straight to the table; there is no address."""

    def __init__(self, table: LandingTable, *, clock: Clock) -> None:
        self._table = table
        self._clock = clock
        self._streams: list[InprocStream] = []

    def connect(self, endpoint: Endpoint, limit_s: float) -> InprocStream:
        del endpoint, limit_s
        near, far = stream_pair()
        self._streams.append(far)
        threading.Thread(
            target=serve_link, args=(far, self._table, self._clock), name="kv-receive", daemon=True
        ).start()
        return near

    def close(self) -> None:
        for stream in self._streams:
            stream.close()


def _timeout(wait_s: float) -> float | None:
    return None if math.isinf(wait_s) else wait_s
