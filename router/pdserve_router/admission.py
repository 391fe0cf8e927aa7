"""Waiting for room on the workers: in order of arrival, bounded in number and time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pdserve.errors import Overloaded

RETRY_AFTER_S = 1.0


class Admission:
    def __init__(self, *, max_queue: int) -> None:
        self._max_queue = max_queue
        self._turn = asyncio.Lock()
        self.num_waiting = 0

    @asynccontextmanager
    async def line(self, limit_s: float) -> AsyncIterator[None]:
        """Entered when it is one's turn to ask for room.

        Raises ``Overloaded`` when the line is full, and when waiting for the turn and in the
        block has taken ``limit_s``.
        """
        if self.num_waiting >= self._max_queue:
            raise Overloaded(
                f"{self.num_waiting} requests are waiting for room already", retry_after_s=RETRY_AFTER_S
            )
        self.num_waiting += 1
        try:
            async with asyncio.timeout(limit_s), self._turn:
                yield
        except TimeoutError:
            raise Overloaded("no worker had room in time", retry_after_s=RETRY_AFTER_S) from None
        finally:
            self.num_waiting -= 1
