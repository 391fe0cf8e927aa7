"""Decode's side: where arriving KV may go, and every check before it is believed.

::

    expect ──► OPEN with a good ticket ──► filling ──► COMMIT, all cells once, digest right ──► sealed
       │                                      │
       └──────────────────────────────────────┴──► aborted(reason) ──► withdraw ──► quiet

``on_sealed`` or ``on_aborted`` is called once for each reservation that is not withdrawn first.
``withdraw`` ends the record; its ``on_quiet`` is called once, when no thread can write into the
blocks any more. Thread-safe: receive threads and the engine thread meet here under one lock,
held for bookkeeping only; bytes move outside it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import xxhash

from pdserve.errors import ProtocolViolation, Unauthorized
from pdserve.kvcache.segment import KVBytes, Segment, WireDtype, WireOrder, wire_layout
from pdserve.transfer.coverage import Coverage
from pdserve.transfer.frame import Commit, Header, commit_digest
from pdserve.transfer.hello import Hello


@dataclass(frozen=True, slots=True)
class LandingPlan:
    """KV of tokens [num_cached_tokens, num_tokens) is owed, into the blocks of ``block_table``."""

    request_id: str
    reservation_id: int
    fence: int
    decode_incarnation: int
    num_tokens: int
    num_cached_tokens: int
    block_table: tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Landing:
    plan: LandingPlan
    coverage: Coverage
    connection: object | None = None
    abort_reason: str = ""
    is_withdrawn: bool = False
    num_writers: int = 0
    num_segments: int = 0
    num_bytes: int = 0
    digest: xxhash.xxh3_64 = field(default_factory=xxhash.xxh3_64)
    on_quiet: Callable[[], None] | None = None

    @property
    def is_open(self) -> bool:
        return not self.is_withdrawn and not self.abort_reason


@dataclass(slots=True)
class Placement:
    """One frame's right to write; from ``begin`` until ``end`` its blocks cannot become quiet."""

    header: Header
    landing: _Landing
    has_let_go: bool = False

    @property
    def block_table(self) -> tuple[int, ...]:
        return self.landing.plan.block_table

    def is_withdrawn(self) -> bool:
        return self.landing.is_withdrawn


class LandingTable:
    def __init__(
        self,
        *,
        hello: Hello,
        kv: KVBytes,
        verify_ticket: Callable[[bytes, LandingPlan], None],
        on_sealed: Callable[[int, int], None],
        on_aborted: Callable[[int, str], None],
    ) -> None:
        """``verify_ticket`` raises ``Unauthorized``. ``on_sealed(reservation_id, first_token_id)``."""
        self.hello = hello
        self.kv = kv
        self._verify_ticket = verify_ticket
        self._on_sealed = on_sealed
        self._on_aborted = on_aborted
        self._lock = threading.Lock()
        self._landings: dict[int, _Landing] = {}
        self._dropped: Counter[str] = Counter()
        self._num_bytes = 0

    @property
    def num_expected(self) -> int:
        return len(self._landings)

    @property
    def num_bytes(self) -> int:
        """Payload bytes placed since start."""
        return self._num_bytes

    def dropped(self) -> dict[str, int]:
        """DATA frames that were read and not placed, by reason."""
        with self._lock:
            return dict(self._dropped)

    # ----------------------------------------------------------- engine side

    def expect(self, plan: LandingPlan) -> None:
        layout = self.kv.layout
        owed = Segment(
            0,
            layout.num_layers,
            0,
            layout.num_kv_heads,
            plan.num_cached_tokens,
            plan.num_tokens - plan.num_cached_tokens,
        )
        with self._lock:
            assert plan.reservation_id not in self._landings, plan
            self._landings[plan.reservation_id] = _Landing(plan, Coverage(owed))

    def withdraw(self, reservation_id: int, on_quiet: Callable[[], None]) -> None:
        """Also right for a reservation that was sealed or never expected: quiet at once."""
        with self._lock:
            landing = self._landings.pop(reservation_id, None)
            if landing is not None:
                landing.is_withdrawn = True
                if landing.num_writers:
                    landing.on_quiet = on_quiet
                    return
        on_quiet()

    # ---------------------------------------------------------- receive side

    def open(self, header: Header, ticket: bytes, connection: object) -> str:
        """Lets ``connection`` fill the reservation; a reason when it may not."""
        with self._lock:
            landing, problem = self._find(header)
        if landing is None:
            return problem
        try:
            self._verify_ticket(ticket, landing.plan)
        except Unauthorized as error:
            return f"{error.label}: {error}"
        with self._lock:
            if landing.connection is not None:
                return "opened_twice"
            landing.connection = connection
        return ""

    def begin(self, header: Header, connection: object) -> Placement | None:
        """The right to place a DATA frame; None: read the payload and drop it."""
        with self._lock:
            landing, problem = self._find(header)
            if landing is not None and landing.connection is not connection:
                landing, problem = None, "not_opened_here"
            if landing is None:
                self._dropped[problem] += 1
                return None
            if header.sequence < landing.num_segments:
                self._dropped["duplicate"] += 1
                return None
            broken = self._check(header, landing)
            if not broken:
                landing.num_writers += 1
        if broken:
            self._abort(landing, broken)
            return None
        return Placement(header, landing)

    def let_go(self, placement: Placement) -> None:
        """The frame's remaining bytes go elsewhere: its blocks are not written any more."""
        if placement.has_let_go:
            return
        placement.has_let_go = True
        self._leave(placement.landing)

    def end(self, placement: Placement, checksum: int, *, claimed: int, finish: Callable[[], None]) -> None:
        """The payload is here. ``finish`` moves staged bytes; then the segment counts if it is right."""
        if placement.has_let_go:
            return
        landing, header = placement.landing, placement.header
        is_right = checksum == claimed
        if is_right and landing.is_open:
            finish()
        with self._lock:
            if is_right and landing.is_open:
                landing.coverage.add(header.segment)
                landing.num_segments += 1
                landing.num_bytes += header.payload_bytes
                landing.digest.update(checksum.to_bytes(8, "little"))
                self._num_bytes += header.payload_bytes
        self._leave(landing)
        if not is_right:
            self._abort(landing, "checksum")

    def commit(self, header: Header, commit: Commit, connection: object) -> str:
        """``""`` when sealed, else the reason why not."""
        with self._lock:
            landing, problem = self._find(header)
            if landing is not None and landing.connection is not connection:
                return "not_opened_here"
            if landing is not None:
                problem = _verdict(landing, commit)
                if not problem:
                    del self._landings[header.reservation_id]
        if landing is None:
            return problem
        if problem:
            self._abort(landing, problem)
        else:
            self._on_sealed(header.reservation_id, commit.first_token_id)
        return problem

    def abort(self, header: Header, reason: str, connection: object) -> None:
        with self._lock:
            landing, _ = self._find(header)
        if landing is not None and landing.connection is connection:
            self._abort(landing, reason)

    def connection_lost(self, connection: object, reason: str) -> None:
        with self._lock:
            orphans = [landing for landing in self._landings.values() if landing.connection is connection]
        for landing in orphans:
            self._abort(landing, reason)

    # -------------------------------------------------------------- internal

    def _find(self, header: Header) -> tuple[_Landing | None, str]:
        landing = self._landings.get(header.reservation_id)
        if landing is None:
            return None, "unknown_reservation"
        if landing.plan.fence != header.fence:
            return None, "old_fence"
        if landing.abort_reason:
            return None, landing.abort_reason
        return landing, ""

    def _check(self, header: Header, landing: _Landing) -> str:
        if header.sequence > landing.num_segments:
            return "segment_missing"
        layout = self.kv.layout
        segment, order = header.segment, header.wire_order
        whole_heads = segment.num_heads == layout.num_kv_heads
        if order is WireOrder.BLOCK and (segment.token_begin % layout.block_size or not whole_heads):
            return "misaligned"
        if header.wire_dtype is not WireDtype.SAME and (order is WireOrder.BLOCK or layout.is_quantized):
            return "wire_dtype"
        if header.payload_bytes != segment.payload_bytes(wire_layout(layout, header.wire_dtype), order):
            return "payload_size"
        try:
            landing.coverage.check(segment)
        except ProtocolViolation:
            return "coverage"
        return ""

    def _leave(self, landing: _Landing) -> None:
        with self._lock:
            landing.num_writers -= 1
            on_quiet = landing.on_quiet if not landing.num_writers else None
        if on_quiet is not None:
            on_quiet()

    def _abort(self, landing: _Landing, reason: str) -> None:
        with self._lock:
            if not landing.is_open or landing.plan.reservation_id not in self._landings:
                return
            landing.abort_reason = reason
        self._on_aborted(landing.plan.reservation_id, reason)


def _verdict(landing: _Landing, commit: Commit) -> str:
    if not landing.coverage.is_complete:
        return "coverage"
    claimed = (commit.num_segments, commit.num_bytes, commit.digest)
    digest = commit_digest(landing.digest, commit.first_token_id)
    if claimed != (landing.num_segments, landing.num_bytes, digest):
        return "digest"
    return ""
