"""Shares one kernel call among the worker's CPU threads, when it is long enough to be worth it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

# Handing over and waiting costs some 50 µs: less work than this is done by the caller alone.
MIN_SHARED_MULTIPLICATIONS = 20_000_000


class CpuThreads:
    """The caller and ``num_threads - 1`` helpers; kernels release the interpreter lock."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._helpers = ThreadPoolExecutor(num_threads - 1, "kernel") if num_threads > 1 else None

    def split(self, work: Callable[[int, int], None], count: int, num_multiplications: int) -> None:
        """Calls ``work(begin, end)`` over ranges that make up ``count``; returns when all are done."""
        num_parts = min(self._num_threads, count)
        if self._helpers is None or num_parts == 1 or num_multiplications < MIN_SHARED_MULTIPLICATIONS:
            work(0, count)
            return
        bounds = [count * part // num_parts for part in range(num_parts + 1)]
        others = [self._helpers.submit(work, bounds[i], bounds[i + 1]) for i in range(1, num_parts)]
        work(bounds[0], bounds[1])
        for other in others:
            other.result()
