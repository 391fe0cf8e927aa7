"""Memory that another process may read: a file without a name whose size cannot change any more."""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref

from pdserve.errors import ConfigError, ProtocolViolation

_FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedMemory:
    """``content`` is the memory; it lasts as long as anything refers to it."""

    def __init__(self, fd: int, *, is_writable: bool) -> None:
        """Takes ``fd`` over, unless it raises ``OSError`` or ``ValueError``."""
        self.num_bytes = os.fstat(fd).st_size
        if is_writable:  # mapped as a whole now: no step has to wait for it
            self.content = mmap.mmap(fd, self.num_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        else:
            self.content = mmap.mmap(fd, self.num_bytes, prot=mmap.PROT_READ)
        self._fd = fd
        weakref.finalize(self, os.close, fd)

    @classmethod
    def create(cls, num_bytes: int) -> SharedMemory:
        """Its pages are there from now on. Raises ``ConfigError``."""
        fd = os.memfd_create("pdserve-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, num_bytes)
        except OSError as error:
            os.close(fd)
            raise ConfigError(f"no shared memory of {num_bytes} bytes to be had: {error}") from error
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _FIXED_SIZE)
        return cls(fd, is_writable=True)

    @classmethod
    def of_peer(cls, fd: int) -> SharedMemory:
        """Takes ``fd`` over. Raises ``ProtocolViolation``, also where it could shrink under a reader."""
        try:
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _FIXED_SIZE != _FIXED_SIZE:
                raise ValueError("its size is not sealed")
            return cls(fd, is_writable=False)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise ProtocolViolation(f"not shared memory: {error}") from error

    def open_for_peer(self) -> int:
        """A descriptor through which nothing can be written; the caller closes it."""
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
