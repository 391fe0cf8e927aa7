"""Counts of things that begin once and end once, by how they ended. Pure.

``num_begun`` less the sum of ``ended`` is what is under way: totals in metrics agree because they
are read from here and nowhere else. One thread writes; readers get copies.
"""

from __future__ import annotations

from collections import Counter

from pdserve.outcomes import outcome_label


class Ledger:
    def __init__(self) -> None:
        self.num_begun = 0
        self._ended: Counter[str] = Counter()

    def begin(self) -> None:
        self.num_begun += 1

    def end(self, reason: str) -> None:
        """``reason`` may carry details behind a colon; they are not counted apart."""
        self._ended[outcome_label(reason)] += 1

    @property
    def ended(self) -> dict[str, int]:
        return dict(self._ended)

    @property
    def num_ended(self) -> int:
        return self._ended.total()

    def count(self, outcome: str) -> int:
        return self._ended[outcome]
