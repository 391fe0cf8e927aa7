"""Time as an argument. Deciding code takes a ``Clock``; tests pass ``ManualClock``."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float:
        """Seconds on a monotonic scale of this process; only differences mean anything."""


class MonotonicClock:
    def now_s(self) -> float:
        return time.monotonic()


class ManualClock:
    """Stands still until told to move."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, f"a monotonic clock cannot go back by {-seconds} s"
        self._now_s += seconds
