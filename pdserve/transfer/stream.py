"""A transport is a byte stream in both directions; these loops send and fill many views over it.

Both loops look up at least every ``POLL_S``: memory that is withdrawn in the middle of a frame
is exchanged for scratch memory and the frame goes on, so neither a slow nor a stopped peer
can keep blocks, and the framing survives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import xxhash

from pdserve.clock import Clock
from pdserve.errors import PeerError

POLL_S = 0.05
NO_PROGRESS_LIMIT_S = 5.0
SCRATCH_BYTES = 1 << 20


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
    digest: xxhash.xxh3_64 | None = None,
    limit_s: float = NO_PROGRESS_LIMIT_S,
) -> None:
    """``on_withdrawn`` is called once no byte of ``views`` is needed any more, if that is early.

    ``digest`` is fed with what was sent, piece by piece while it is still in the CPU's cache.
    """
    _move_all(stream.send_some, views, clock, is_withdrawn, on_withdrawn, digest, limit_s)


def receive_all(
    stream: ByteStream,
    views: Sequence[memoryview],
    clock: Clock,
    *,
    is_withdrawn: Callable[[], bool] = never,
    on_withdrawn: Callable[[], None] = lambda: None,
    digest: xxhash.xxh3_64 | None = None,
    limit_s: float = NO_PROGRESS_LIMIT_S,
) -> None:
    """``on_withdrawn`` is called once nothing can land in ``views`` any more, if that is early."""
    _move_all(stream.receive_some, views, clock, is_withdrawn, on_withdrawn, digest, limit_s)


def skip(stream: ByteStream, num_bytes: int, clock: Clock) -> None:
    """Reads and forgets."""
    receive_all(stream, scratch(num_bytes), clock)


def _move_all(
    move: Move,
    views: Sequence[memoryview],
    clock: Clock,
    is_withdrawn: Callable[[], bool],
    on_withdrawn: Callable[[], None],
    digest: xxhash.xxh3_64 | None,
    limit_s: float,
) -> None:
    remaining = list(views)
    left = sum(len(view) for view in remaining)
    first = 0
    withdrawn = False
    wait_s = POLL_S if math.isfinite(limit_s) else math.inf
    last_progress_s = clock.now_s()
    while left:
        if not withdrawn and is_withdrawn():
            withdrawn, first, remaining = True, 0, scratch(left)
            on_withdrawn()
        moved = move(remaining[first : first + MAX_VIEWS], wait_s)
        left -= moved
        if moved:
            last_progress_s = clock.now_s()
            first = _advance(remaining, first, moved, digest)
        elif clock.now_s() - last_progress_s > limit_s:
            raise LinkLost(f"no progress for {limit_s:g} s with {left} bytes to go")


# What the system takes in one call is 1024; fewer keeps the slices short.
MAX_VIEWS = 512


def _advance(views: list[memoryview], first: int, moved: int, digest: xxhash.xxh3_64 | None) -> int:
    """The index of the first view that is not done; that view is cut to its rest."""
    while moved:
        done = views[first][:moved]
        if digest is not None:
            digest.update(done)
        moved -= len(done)
        if len(done) < len(views[first]):
            views[first] = views[first][len(done) :]
        else:
            first += 1
    return first


def scratch(num_bytes: int) -> list[memoryview]:
    """Views of one small buffer, over and over."""
    buffer = memoryview(bytearray(min(num_bytes, SCRATCH_BYTES)))
    whole, rest = divmod(num_bytes, SCRATCH_BYTES)
    return [buffer] * whole + ([buffer[:rest]] if rest else [])
