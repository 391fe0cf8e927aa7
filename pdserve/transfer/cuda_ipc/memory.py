"""Device memory that another process may map."""

from __future__ import annotations

from typing import Protocol

from pdserve.transfer.device.memory import DeviceBuffer


class IpcMemory(Protocol):
    """All calls raise ``DeviceFault``. They work on the calling thread's current device."""

    def allocate(self, num_bytes: int) -> tuple[DeviceBuffer, bytes]:
        """And the handle, as others map it."""

    def free(self, buffer: DeviceBuffer) -> None:
        """Only when nobody has it mapped."""

    def map(self, handle: bytes, num_bytes: int) -> DeviceBuffer:
        """Of another process on this host."""

    def unmap(self, buffer: DeviceBuffer) -> None: ...
