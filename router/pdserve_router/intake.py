"""Which requests are being served, and whether new ones are taken: a router ends by finishing.

::

    accepting ──► running      both overlap: from the first look at a request to its last byte
                               there is no moment at which nobody counts it
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from pdserve.errors import Overloaded


class Intake:
    def __init__(self) -> None:
        self.num_running = 0
        self.is_open = True
        self._num_accepting = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_idle(self) -> bool:
        return self._num_accepting + self.num_running == 0

    def close(self) -> None:
        self.is_open = False

    @contextmanager
    def accepting(self) -> Iterator[None]:
        """Raises ``Overloaded`` once closed: another router may take the request."""
        if not self.is_open:
            raise Overloaded("the router is shutting down", retry_after_s=1.0)
        self._num_accepting += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_accepting -= 1
            self._note_idle()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Entered while the request is still being accepted."""
        self.num_running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_running -= 1
            self._note_idle()

    def _note_idle(self) -> None:
        if self.is_idle:
            self._idle.set()

    async def wait_idle(self) -> None:
        await self._idle.wait()
