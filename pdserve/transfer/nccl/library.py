"""What is asked of NCCL, and nothing more: tests put a scripted one in its place."""

from __future__ import annotations

from typing import Protocol

from pdserve.errors import DeviceFault

# Of ncclResult_t; everything else is an error.
SUCCESS = 0
IN_PROGRESS = 7


class NcclError(DeviceFault):
    """A call failed, or something that was started failed later."""

    def __init__(self, call: str, status: int, detail: str) -> None:
        super().__init__(f"nccl: {call}: {detail} (status {status})")
        self.status = status


class NcclLibrary(Protocol):
    """Communicators of two ranks that never block: what a call starts goes on after it.

    ``status`` tells how it goes, and until it is ``SUCCESS`` no other call but ``abort`` may be made.
    A communicator is used by one thread at a time. All calls raise ``NcclError``.
    """

    def version(self) -> str: ...

    def unique_id(self) -> bytes:
        """Holds a thread and a socket of this process until both ranks have joined."""

    def init(self, unique_id: bytes, *, rank: int) -> object:
        """Starts to join, with the thread's current device; what it returns is the communicator."""

    def status(self, communicator: object) -> int:
        """``SUCCESS``, ``IN_PROGRESS``, or the error of anything started before."""

    def send(self, communicator: object, data: object, *, peer: int, stream: int) -> None: ...

    def receive(self, communicator: object, data: object, *, peer: int, stream: int) -> None: ...

    def abort(self, communicator: object) -> None:
        """Ends what is in flight and frees the communicator. Known to hang now and then."""
