"""The state of every hand-off that decode has granted. Pure; owned by the engine thread.

::

    granted ──► sealed            the engine owns the blocks from here; the record ends
       │
       └──► draining ──► free     quiet: nothing can land any more, the record ends
                │
                └──► quarantined ──► free     quiet came late; until then an alarm counts it

A time-out never frees blocks: it moves them to quarantine, where only the proof of
quiet gets them out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from pdserve.clock import Clock


class Phase(StrEnum):
    GRANTED = "granted"
    DRAINING = "draining"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True)
class Grant:
    """What decode promised: ``decode_incarnation`` and ``fence`` make it this grant and no other."""

    reservation_id: int
    fence: int
    decode_incarnation: int
    request_id: str
    num_blocks: int
    granted_s: float


@dataclass(slots=True)
class _Record:
    grant: Grant
    phase: Phase
    drain_deadline_s: float = 0.0


class Reservations:
    def __init__(self, *, decode_incarnation: int, drain_limit_s: float, clock: Clock) -> None:
        self._incarnation = decode_incarnation
        self._drain_limit_s = drain_limit_s
        self._clock = clock
        self._last_id = 0
        self._records: dict[int, _Record] = {}
        self._by_request: dict[str, int] = {}

    def grant(self, request_id: str, *, num_blocks: int) -> Grant:
        """Ids and fences only rise, so bytes for an earlier grant can never match a later one."""
        assert request_id not in self._by_request, f"{request_id} holds a reservation already"
        self._last_id += 1
        now_s = self._clock.now_s()
        grant = Grant(self._last_id, self._last_id, self._incarnation, request_id, num_blocks, now_s)
        self._records[grant.reservation_id] = _Record(grant, Phase.GRANTED)
        self._by_request[request_id] = grant.reservation_id
        return grant

    def of_request(self, request_id: str) -> Grant | None:
        """The grant that is still being filled for this request."""
        reservation_id = self._by_request.get(request_id)
        return None if reservation_id is None else self._records[reservation_id].grant

    def seal(self, reservation_id: int) -> Grant | None:
        """The KV is here. None when the reservation was given up before: a late notice, ignored."""
        record = self._records.get(reservation_id)
        if record is None or record.phase is not Phase.GRANTED:
            return None
        del self._records[reservation_id], self._by_request[record.grant.request_id]
        return record.grant

    def drain(self, reservation_id: int) -> Grant | None:
        """Gives the reservation up; None when it is not (or no longer) being filled."""
        record = self._records.get(reservation_id)
        if record is None or record.phase is not Phase.GRANTED:
            return None
        del self._by_request[record.grant.request_id]
        record.phase = Phase.DRAINING
        record.drain_deadline_s = self._clock.now_s() + self._drain_limit_s
        return record.grant

    def quiet(self, reservation_id: int) -> Grant:
        """The proof: nothing can land in its blocks any more. The record ends."""
        record = self._records.pop(reservation_id)
        assert record.phase is not Phase.GRANTED, f"{record.grant} became quiet before it was given up"
        return record.grant

    def quarantine_overdue(self) -> list[Grant]:
        """Moves what has drained for too long; the returned grants are newly quarantined."""
        now_s = self._clock.now_s()
        overdue = [record for record in self._in(Phase.DRAINING) if now_s > record.drain_deadline_s]
        for record in overdue:
            record.phase = Phase.QUARANTINED
        return [record.grant for record in overdue]

    def count(self, phase: Phase) -> int:
        return sum(1 for _ in self._in(phase))

    @property
    def num_quarantined_blocks(self) -> int:
        """Blocks that are kept because something may still land in them: worth an alarm."""
        return sum(record.grant.num_blocks for record in self._in(Phase.QUARANTINED))

    def _in(self, phase: Phase) -> Iterator[_Record]:
        return (record for record in self._records.values() if record.phase is phase)
