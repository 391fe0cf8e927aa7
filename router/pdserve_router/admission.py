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

    @property
    def is_contended(self) -> bool:
        """Whether a newcomer has to stand in line."""
        return self.num_waiting > 0

    @asynccontextmanager
    async def line(self) -> AsyncIterator[None]:
        """Entered when it is this request's turn to ask. Raises ``Overloaded`` when the line is full."""
        if self.num_waiting >= self._max_queue:
            raise Overloaded(
                f"{self.num_waiting} requests are waiting for room already", retry_after_s=RETRY_AFTER_S
            )
        self.num_waiting += 1
        try:
            async with self._turn:
                yield
        finally:
            self.num_waiting -= 1
