"""A transport is a byte stream in both directions; these loops send and fill whole buffers over it.

Buffers are the link's own, never blocks: what is given up in the middle of a frame is only told to
the caller, within ``POLL_S``, and the frame goes on. So neither a slow nor a stopped peer can keep
blocks, and the framing survives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from pdserve.clock import Clock
from pdserve.errors import PeerError

POLL_S = 0.05
NO_PROGRESS_LIMIT_S = 5.0
SKIP_BYTES = 256 << 10


class LinkLost(PeerError):
    """The stream ended or stood still; what was on it is aborted."""

    label = "link_lost"


class ByteStream(Protocol):
    """One thread sends, one receives. Calls wait at most ``wait_s`` (infinite: until closed)."""

    def send_some(self, views: Sequence[memoryview], wait_s: float) -> int:
        """How many bytes of the views, in order, were taken; 0 when none could be. Raises ``LinkLost``."""

    def receive_some(self, views: Sequence[memoryview], wait_s: float) -> int:
        """How many bytes were put into the views, in order; 0 when none came. Raises ``LinkLost``."""

    def close(self) -> None:
        """Idempotent, from any thread; the calls above then raise ``LinkLost``."""


Move = Callable[[Sequence[memoryview], float], int]


def never() -> bool:
    return False


def send_all(
    stream: ByteStream,
    views: Sequence[memoryview],
    clock: Clock,
    *,
    is_withdrawn: Callable[[], bool] = never,
    on_withdrawn: Callable[[], None] = lambda: None,
    limit_s: float = NO_PROGRESS_LIMIT_S,
) -> None:
    """``on_withdrawn`` is called when ``is_withdrawn`` becomes true before the end."""
    _move_all(stream.send_some, views, clock, is_withdrawn, on_withdrawn, limit_s)


def receive_all(
    stream: ByteStream,
    views: Sequence[memoryview],
    clock: Clock,
    *,
    is_withdrawn: Callable[[], bool] = never,
    on_withdrawn: Callable[[], None] = lambda: None,
    limit_s: float = NO_PROGRESS_LIMIT_S,
) -> None:
    """``on_withdrawn`` as in ``send_all``."""
    _move_all(stream.receive_some, views, clock, is_withdrawn, on_withdrawn, limit_s)


def skip(stream: ByteStream, num_bytes: int, clock: Clock) -> None:
    """Reads and forgets."""
    buffer = memoryview(bytearray(min(num_bytes, SKIP_BYTES)))
    for begin in range(0, num_bytes, SKIP_BYTES):
        receive_all(stream, [buffer[: num_bytes - begin]], clock)


def _move_all(
    move: Move,
    views: Sequence[memoryview],
    clock: Clock,
    is_withdrawn: Callable[[], bool],
    on_withdrawn: Callable[[], None],
    limit_s: float,
) -> None:
    remaining = list(views)
    left = sum(len(view) for view in remaining)
    withdrawn = False
    wait_s = POLL_S if math.isfinite(limit_s) else math.inf
    last_progress_s = clock.now_s()
    while left:
        if not withdrawn and is_withdrawn():
            withdrawn = True
            on_withdrawn()
        moved = move(remaining, wait_s)
        left -= moved
        if moved:
            last_progress_s = clock.now_s()
            remaining = _rest(remaining, moved)
        elif clock.now_s() - last_progress_s > limit_s:
            raise LinkLost(f"no progress for {limit_s:g} s with {left} bytes to go")


def _rest(views: list[memoryview], moved: int) -> list[memoryview]:
    for index, view in enumerate(views):
        if moved < len(view):
            return [view[moved:], *views[index + 1 :]]
        moved -= len(view)
    return []
