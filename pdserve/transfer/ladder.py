"""Which transport to try first for one decode process. Pure.

Decode lists its endpoints in order of preference. One whose link failed goes behind those that
did not, for a back-off time; it is never left out, since it may be the only one that works.
"""

from __future__ import annotations

from collections.abc import Iterable

from pdserve.transfer.push import Endpoint

BACK_OFF_S = 30.0


class Ladder:
    def __init__(self) -> None:
        self._demoted_until_s: dict[str, float] = {}

    def demote(self, transport: str, now_s: float) -> None:
        self._demoted_until_s[transport] = now_s + BACK_OFF_S

    def is_demoted(self, transport: str, now_s: float) -> bool:
        return now_s < self._demoted_until_s.get(transport, now_s)

    def has_demoted(self, now_s: float) -> bool:
        return any(self.is_demoted(transport, now_s) for transport in self._demoted_until_s)

    def in_order(self, endpoints: Iterable[Endpoint], now_s: float) -> list[Endpoint]:
        """The endpoints as they are to be tried; among demoted ones, decode's order stands."""
        return sorted(endpoints, key=lambda endpoint: self.is_demoted(endpoint.transport, now_s))
