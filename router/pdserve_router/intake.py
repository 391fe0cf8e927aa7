"""Which requests are being served, and whether new ones are taken: a router ends by finishing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from pdserve.errors import Overloaded


class Intake:
    def __init__(self) -> None:
        self.num_running = 0
        self.is_open = True
        self._idle = asyncio.Event()
        self._idle.set()

    def check_open(self) -> None:
        """Raises ``Overloaded`` once closed: another router may take the request."""
        if not self.is_open:
            raise Overloaded("the router is shutting down", retry_after_s=1.0)

    def close(self) -> None:
        self.is_open = False

    @contextmanager
    def running(self) -> Iterator[None]:
        self.num_running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_running -= 1
            if self.num_running == 0:
                self._idle.set()

    async def wait_idle(self) -> None:
        await self._idle.wait()
