"""Whether two processes are on one host and know each other's process ids, and whether one still runs."""

from __future__ import annotations

import os
import select
from dataclasses import dataclass
from pathlib import Path

from pdserve.transfer.device.pairing import PairRefused, number, text


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """``pid`` means something to those with the same boot and PID namespace only."""

    boot_id: str
    pid_namespace: int
    pid: int

    def as_dict(self) -> dict[str, object]:
        return {"boot_id": self.boot_id, "pid_namespace": self.pid_namespace, "pid": self.pid}


def own_identity() -> ProcessIdentity:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ProcessIdentity(boot_id, os.stat("/proc/self/ns/pid").st_ino, os.getpid())


def identity_from(content: dict[str, object]) -> ProcessIdentity:
    """Raises ``ProtocolViolation``."""
    return ProcessIdentity(text(content, "boot_id"), number(content, "pid_namespace"), number(content, "pid"))


def check_neighbour(ours: ProcessIdentity, theirs: ProcessIdentity) -> None:
    """Raises ``PairRefused``."""
    if ours.boot_id != theirs.boot_id:
        raise PairRefused("the peer is on another host")
    if ours.pid_namespace != theirs.pid_namespace:
        raise PairRefused("the peer is in another PID namespace")


class ProcessWatch:
    """One process, also when its id has been given to another."""

    def __init__(self, pid: int) -> None:
        """Raises ``PairRefused`` when there is no such process."""
        try:
            self._fd = os.pidfd_open(pid)
        except (OSError, OverflowError) as error:
            raise PairRefused(f"process {pid} cannot be watched: {error}") from error

    def has_exited(self) -> bool:
        """Its GPU contexts are gone with it: the kernel closes a process's devices before it reports this."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        os.close(self._fd)
