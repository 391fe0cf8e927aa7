"""Decode's staging buffers that prefill processes have mapped.

::

    new ──► in use by one link ──► retired ──► freed

A retired buffer may still be written to: its link has ended, the peer's copy perhaps not. It is freed
when the peer says that it has unmapped it, or when the peer's process is gone; never by a time-out,
and it never serves another link.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pdserve.errors import PeerError
from pdserve.transfer.cuda_ipc.host import ProcessWatch
from pdserve.transfer.cuda_ipc.memory import IpcMemory
from pdserve.transfer.device.memory import DeviceBuffer
from pdserve.transfer.device.pairing import PairRefused

MAX_EXPORTS = 32


@dataclass(frozen=True, slots=True, eq=False)
class Export:
    """``name``: unguessable, so that a peer can only speak of buffers that it was given."""

    name: str
    handle: bytes
    buffer: DeviceBuffer
    watch: ProcessWatch


@dataclass(slots=True)
class _Retired:
    export: Export
    is_idle: Callable[[], bool]  # our own reading of it, that is
    is_unmapped: bool = False

    def may_go(self) -> bool:
        return (self.is_unmapped or self.export.watch.has_exited()) and self.is_idle()


class IpcExports:
    """Thread-safe."""

    def __init__(self, memory: IpcMemory) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self._num_in_use = 0
        self._retired: dict[str, _Retired] = {}

    @property
    def num_retired(self) -> int:
        """Buffers in quarantine, as of the last link that was made."""
        return len(self._retired)

    def new(self, num_bytes: int, *, pid: int) -> Export:
        """Raises ``PairRefused`` or ``DeviceFault``."""
        self.sweep()
        with self._lock:
            if self._num_in_use + len(self._retired) >= MAX_EXPORTS:
                raise PairRefused(f"{MAX_EXPORTS} buffers are mapped or may be")
            watch = ProcessWatch(pid)
            try:
                buffer, handle = self._memory.allocate(num_bytes)
            except PeerError:
                watch.close()
                raise
            self._num_in_use += 1
        return Export(secrets.token_hex(16), handle, buffer, watch)

    def retire(self, export: Export, is_idle: Callable[[], bool]) -> None:
        """``is_idle``: whether this process is done with it. What that keeps alive is kept as well."""
        with self._lock:
            self._num_in_use -= 1
            self._retired[export.name] = _Retired(export, is_idle)

    def unmapped(self, names: Iterable[str]) -> None:
        """The peer's word that it cannot write to these any more."""
        with self._lock:
            for name in names:
                if name in self._retired:
                    self._retired[name].is_unmapped = True

    def sweep(self) -> None:
        """Frees what may go, when a link is made: its thread uses the device. Raises ``DeviceFault``."""
        with self._lock:
            for name, retired in list(self._retired.items()):
                if retired.may_go():
                    del self._retired[name]
                    retired.export.watch.close()
                    self._memory.free(retired.export.buffer)
