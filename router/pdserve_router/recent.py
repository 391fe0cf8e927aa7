"""The latencies of the last minutes, in slices of time, for people who look at the page."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from pdserve.timeline import Timeline

SLICE_S = 10.0
NUM_SLICES = 30
# A slice keeps no more of each kind: the newest.
MAX_PER_SLICE = 2000

Percentiles = dict[str, float]


class _Slice:
    def __init__(self, number: int) -> None:
        self.number = number
        self.values_s = {kind: deque[float](maxlen=MAX_PER_SLICE) for kind in ("ttft", "itl", "handoff_gap")}


class Recent:
    """Of choices that ended; a slice covers ``SLICE_S`` on the router's clock."""

    def __init__(self) -> None:
        self._slices: deque[_Slice] = deque(maxlen=NUM_SLICES)

    def ended(self, timeline: Timeline, now_s: float) -> None:
        values_s = self._slice(int(now_s // SLICE_S)).values_s
        values_s["itl"].extend(timeline.itls_s)
        if timeline.ttft_s is not None:
            values_s["ttft"].append(timeline.ttft_s)
        if timeline.handoff_gap_s is not None:
            values_s["handoff_gap"].append(timeline.handoff_gap_s)

    def _slice(self, number: int) -> _Slice:
        if not self._slices or self._slices[-1].number != number:
            self._slices.append(_Slice(number))
        return self._slices[-1]

    def percentiles_ms(self, now_s: float) -> dict[str, list[Percentiles | None]]:
        """By kind, ``NUM_SLICES`` entries, the last being now; None where nothing was measured."""
        newest = int(now_s // SLICE_S)
        by_number = {part.number: part.values_s for part in self._slices}
        numbers = range(newest - NUM_SLICES + 1, newest + 1)
        return {
            kind: [_percentiles_ms(by_number[n][kind]) if n in by_number else None for n in numbers]
            for kind in ("ttft", "itl", "handoff_gap")
        }


def _percentiles_ms(values_s: Iterable[float]) -> Percentiles | None:
    """By nearest rank."""
    ordered = sorted(values_s)
    if not ordered:
        return None
    last = len(ordered) - 1
    return {name: round(1000 * ordered[round(q * last)], 3) for name, q in (("p50", 0.5), ("p95", 0.95))}
