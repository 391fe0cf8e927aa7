"""asyncio from outside: a loop on a thread of its own."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")
WAIT_S = 10.0


class EventLoopThread:
    """An asyncio loop on a thread, for parts that live on one."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Result], limit_s: float = WAIT_S) -> Result:
        return self.submit(coroutine).result(limit_s)

    def submit(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)


@functools.cache
def event_loop_thread() -> EventLoopThread:
    """One for the whole process: grpc.aio does not like its event loop to be closed under it."""
    return EventLoopThread()
