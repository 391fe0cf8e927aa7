"""A device without a device: buffers are numpy arrays, a lane is a list of work that is done when asked."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import xxhash

from pdserve.kvcache.layout import KVLayout
from pdserve.kvcache.segment import KVBytes, Segment, WireOrder
from pdserve.transfer.device.memory import DeviceBuffer

Bytes = npt.NDArray[np.uint8]
# True once it is done; asked again until then.
Work = Callable[[], bool]


@dataclass(frozen=True)
class FakeBuffer:
    content: Bytes

    @property
    def num_bytes(self) -> int:
        return len(self.content)

    def head(self, num_bytes: int) -> Bytes:
        return self.content[:num_bytes]


@dataclass
class CopyScript:
    """What goes wrong with a device's copies between buffers."""

    holds_copies: bool = False
    has_held: bool = False
    corrupts_copies: bool = False


class FakeLane:
    def __init__(self, kv: KVBytes, handle: int, script: CopyScript) -> None:
        self.handle = handle
        self._script = script
        self._kv = kv
        self._work: deque[Work] = deque()
        self._lock = threading.Lock()

    def enqueue(self, work: Work) -> None:
        with self._lock:
            self._work.append(work)

    def gather(
        self, segment: Segment, block_table: Sequence[int], wire_order: WireOrder, into: DeviceBuffer
    ) -> None:
        def work() -> bool:
            out = _head(into, segment.payload_bytes(self._kv.layout, wire_order))
            self._kv.outgoing(segment, block_table, wire_order).gather(0, out.data)
            return True

        self.enqueue(work)

    def scatter(
        self, segment: Segment, block_table: Sequence[int], wire_order: WireOrder, source: DeviceBuffer
    ) -> None:
        def work() -> bool:
            target = self._kv.incoming(segment, block_table, wire_order)
            target.payload.scatter(0, _head(source, segment.payload_bytes(self._kv.layout, wire_order)).data)
            target.finish()
            return True

        self.enqueue(work)

    def copy(self, source: DeviceBuffer, target: DeviceBuffer, num_bytes: int) -> None:
        def work() -> bool:
            if self._script.holds_copies:
                self._script.has_held = True
                return False
            _head(target, num_bytes)[:] = _head(source, num_bytes)
            if self._script.corrupts_copies:
                _head(target, 1)[0] ^= 1
            return True

        self.enqueue(work)

    def checksum(self, buffer: DeviceBuffer, num_bytes: int) -> Callable[[], int]:
        result: list[int] = []

        def work() -> bool:
            result.append(xxhash.xxh3_64_intdigest(_head(buffer, num_bytes).tobytes()))
            return True

        self.enqueue(work)
        return lambda: result[0]

    def mark(self) -> Callable[[], bool]:
        reached = threading.Event()

        def work() -> bool:
            reached.set()
            return True

        self.enqueue(work)
        return lambda: self._run() or reached.is_set()

    def _run(self) -> bool:
        """As far as it goes. False, for the line above."""
        with self._lock:
            while self._work and self._work[0]():
                self._work.popleft()
        return False


@dataclass
class FakeDevice:
    """Lanes by handle, as a library that is given one finds them."""

    lanes: dict[int, FakeLane] = field(default_factory=dict)
    script: CopyScript = field(default_factory=CopyScript)
    _handles: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def new_lane(self, kv: KVBytes) -> FakeLane:
        lane = FakeLane(kv, next(self._handles), self.script)
        self.lanes[lane.handle] = lane
        return lane


class FakeDeviceKV:
    """Any pool of bytes as if it lay on a device."""

    def __init__(self, kv: KVBytes, device: FakeDevice) -> None:
        """``buffers``: all that were ever made, so that a test sees which are still held."""
        self._kv = kv
        self._device = device
        self.buffers: list[weakref.ref[FakeBuffer]] = []

    @property
    def layout(self) -> KVLayout:
        return self._kv.layout

    def use_device(self) -> None:
        """There is no other."""

    def new_lane(self) -> FakeLane:
        return self._device.new_lane(self._kv)

    def new_buffer(self, num_bytes: int) -> FakeBuffer:
        buffer = FakeBuffer(np.zeros(num_bytes, np.uint8))
        self.buffers.append(weakref.ref(buffer))
        return buffer


def _head(buffer: DeviceBuffer, num_bytes: int) -> Bytes:
    content = buffer.head(num_bytes)
    assert isinstance(content, np.ndarray)
    return content
