"""Prefill's mappings of decode's staging buffers, and which of them are over."""

from __future__ import annotations

import logging
import threading

from pdserve.clock import Clock
from pdserve.errors import PeerError
from pdserve.transfer.cuda_ipc.memory import IpcMemory
from pdserve.transfer.device.memory import DeviceBuffer, DeviceKV, Lane
from pdserve.transfer.device.wait import wait_until
from pdserve.transfer.socket_stream import Tenancy

logger = logging.getLogger(__name__)

UNMAP_LIMIT_S = 10.0
# What decode is told of at most; those before it have heard of already.
MAX_UNMAPPED_NAMES = 64


class Mapping:
    """One link's: the peer's buffer, our own in front of it, and the lane between. They share a fate."""

    def __init__(self, mappings: IpcMappings, name: str, remote: DeviceBuffer) -> None:
        self.name = name
        self.remote = remote
        self.staging = mappings.kv.new_buffer(remote.num_bytes)
        self.lane: Lane = mappings.kv.new_lane()
        self.tenancy = Tenancy(lambda: mappings.begin_unmap(self))

    def check_open(self) -> None:
        """Raises ``LinkLost`` once it is closed."""
        with self.tenancy.inside():
            pass

    def close(self) -> None:
        """Idempotent, from any thread. Unmapped when the copies that were begun are done."""
        self.tenancy.end(wake=lambda: None)


class IpcMappings:
    """Thread-safe."""

    def __init__(self, memory: IpcMemory, kv: DeviceKV, clock: Clock) -> None:
        self.kv = kv
        self._memory = memory
        self._clock = clock
        self._lock = threading.Lock()
        self._unmapping: set[Mapping] = set()
        self._unmapped: list[str] = []

    def unmapped_names(self) -> list[str]:
        with self._lock:
            return list(self._unmapped)

    def open(self, name: str, handle: bytes, num_bytes: int) -> Mapping:
        """Raises ``DeviceFault``."""
        try:
            remote = self._memory.map(handle, num_bytes)
        except PeerError:
            self._note_unmapped(name)
            raise
        try:
            return Mapping(self, name, remote)
        except PeerError:
            self._memory.unmap(remote)
            self._note_unmapped(name)
            raise

    def begin_unmap(self, mapping: Mapping) -> None:
        """On a thread of its own: it waits for the device."""
        with self._lock:
            self._unmapping.add(mapping)
        threading.Thread(target=self._unmap, args=(mapping,), name="cuda-ipc-unmap", daemon=True).start()

    def _unmap(self, mapping: Mapping) -> None:
        try:
            self.kv.use_device()
            wait_until(mapping.lane.mark(), self._clock, what="cuda-ipc: unmap", limit_s=UNMAP_LIMIT_S)
            self._memory.unmap(mapping.remote)
        except PeerError as error:
            logger.error("cuda_ipc_unmap_failed detail=%s", error)
            return  # it stays mapped, and decode's buffer where it is
        with self._lock:
            self._unmapping.discard(mapping)
        self._note_unmapped(mapping.name)

    def _note_unmapped(self, name: str) -> None:
        with self._lock:
            self._unmapped = [*self._unmapped, name][-MAX_UNMAPPED_NAMES:]
