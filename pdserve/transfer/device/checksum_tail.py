"""The checksum behind a payload that travels beside the stream."""

from __future__ import annotations

from collections.abc import Callable

from pdserve.clock import Clock
from pdserve.transfer.frame import CHECKSUM, CHECKSUM_BYTES
from pdserve.transfer.stream import ByteStream, never, receive_all


class ChecksumTail:
    """Until it is read nothing else is on the stream, so looking for it shows as well whether that lives."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._content = bytearray(CHECKSUM_BYTES)
        self._rest = memoryview(self._content)

    def poll(self) -> None:
        """Raises ``LinkLost``."""
        if self._rest:
            self._rest = self._rest[self._stream.receive_some([self._rest], 0.0) :]

    def read(
        self,
        clock: Clock,
        *,
        is_withdrawn: Callable[[], bool] = never,
        on_withdrawn: Callable[[], None] = lambda: None,
    ) -> int:
        if self._rest:
            receive_all(
                self._stream, [self._rest], clock, is_withdrawn=is_withdrawn, on_withdrawn=on_withdrawn
            )
        return int(CHECKSUM.unpack(self._content)[0])
