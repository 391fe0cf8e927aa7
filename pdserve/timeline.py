"""When things happened to a request; every latency figure derives from these. Pure.

::

    received ─► reserved ─► first_token ─► second_token ─► … ─► finished
    │◄──────── ttft ───────►│◄─ handoff gap ─►│
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(slots=True)
class Timeline:
    """Seconds on the router's monotonic clock; None where it has not happened."""

    received_s: float
    reserved_s: float | None = None
    token_times_s: list[float] = field(default_factory=list)
    finished_s: float | None = None

    def tokens(self, count: int, now_s: float) -> None:
        self.token_times_s += [now_s] * count

    @property
    def ttft_s(self) -> float | None:
        return self.token_times_s[0] - self.received_s if self.token_times_s else None

    @property
    def handoff_gap_s(self) -> float | None:
        """Token 1 to token 2."""
        return self.token_times_s[1] - self.token_times_s[0] if len(self.token_times_s) > 1 else None

    @property
    def itls_s(self) -> list[float]:
        """Gaps between neighbours from token 2 on: the hand-off gap is counted on its own."""
        times = self.token_times_s[1:]
        return [later - earlier for earlier, later in pairwise(times)]

    @property
    def tpot_s(self) -> float | None:
        times = self.token_times_s
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    @property
    def duration_s(self) -> float | None:
        """To the last token that came."""
        return self.token_times_s[-1] - self.received_s if self.token_times_s else None

    @property
    def queue_s(self) -> float | None:
        return None if self.reserved_s is None else self.reserved_s - self.received_s
