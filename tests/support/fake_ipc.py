"""CUDA's memory shared between processes, all of them in this one."""

from __future__ import annotations

import itertools
import threading

import numpy as np

from pdserve.errors import DeviceFault
from pdserve.transfer.device.memory import DeviceBuffer
from tests.support.fake_device import FakeBuffer


class FakeIpcHost:
    """What lives on one host, by handle, and how often it is mapped."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.allocated: dict[bytes, FakeBuffer] = {}
        self.num_mappings: dict[bytes, int] = {}
        self.handles = itertools.count(1)


class FakeIpcMemory:
    """One process's access. ``problems``: what CUDA would have punished with undefined behaviour."""

    def __init__(self, host: FakeIpcHost) -> None:
        self._host = host
        self.problems: list[str] = []
        self.num_allocated = 0
        self.num_mapped = 0
        self.fails = False

    def allocate(self, num_bytes: int) -> tuple[FakeBuffer, bytes]:
        self._check()
        with self._host.lock:
            handle = next(self._host.handles).to_bytes(64, "little")
            buffer = self._host.allocated[handle] = FakeBuffer(np.zeros(num_bytes, np.uint8))
            self._host.num_mappings[handle] = 0
            self.num_allocated += 1
        return buffer, handle

    def free(self, buffer: DeviceBuffer) -> None:
        with self._host.lock:
            handle = self._handle(buffer)
            if self._host.num_mappings[handle]:
                self.problems.append("freed while mapped")
            del self._host.allocated[handle]
            self.num_allocated -= 1

    def map(self, handle: bytes, num_bytes: int) -> FakeBuffer:
        self._check()
        with self._host.lock:
            self._host.num_mappings[handle] += 1
            self.num_mapped += 1
            return FakeBuffer(self._host.allocated[handle].content[:num_bytes])

    def unmap(self, buffer: DeviceBuffer) -> None:
        with self._host.lock:
            self._host.num_mappings[self._handle(buffer)] -= 1
            self.num_mapped -= 1

    def _handle(self, buffer: DeviceBuffer) -> bytes:
        address = _address(buffer)
        return next(handle for handle, one in self._host.allocated.items() if _address(one) == address)

    def _check(self) -> None:
        if self.fails:
            raise DeviceFault("scripted")


def _address(buffer: DeviceBuffer) -> int:
    assert isinstance(buffer, FakeBuffer)
    return int(buffer.content.__array_interface__["data"][0])
