"""The link to one decode process: a thread that sends, a thread that hears the answers.

::

    notes (engine thread) ──► pushes ──► sender thread ──► DATA … COMMIT ──► SEALED / ABORTED ──► reader
                                └──────── abort ──► ABORT                           └──► on_done

The sender links up with the first push, by the first of its endpoints that works, in the ladder's
order. When the link is lost every push on it ends and its transport is demoted; the next push makes
a new sender and a new link.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pdserve.clock import Clock
from pdserve.errors import IncompatiblePeer, PeerError, ProtocolViolation
from pdserve.kvcache.segment import KVBytes, Segment, WireDtype, WireOrder, wire_layout
from pdserve.transfer.control import receive_frame, send_frame
from pdserve.transfer.frame import (
    CHECKSUM,
    FrameKind,
    Header,
    pack_json,
    pack_reason,
    unpack_json,
    unpack_reason,
)
from pdserve.transfer.hello import Hello, check_compatible, wire_order
from pdserve.transfer.ladder import Ladder
from pdserve.transfer.payload import PayloadSender, SourceHold
from pdserve.transfer.push import Endpoint, HandoffOutcome, Push, PushPlan
from pdserve.transfer.stream import ByteStream, send_all

logger = logging.getLogger(__name__)

IDLE_FOREVER_S = float("inf")


@dataclass(frozen=True, slots=True)
class LinkLimits:
    link_s: float = 5.0
    reply_s: float = 5.0


@dataclass(slots=True, eq=False)
class _Entry:
    push: Push
    on_done: Callable[[HandoffOutcome], None]
    is_open: bool = False  # OPEN has been sent
    is_sending: bool = False  # its blocks are being read
    wire_dtype: WireDtype = WireDtype.SAME
    abort_reason: str = ""
    reply_deadline_s: float = IDLE_FOREVER_S


@dataclass(frozen=True, slots=True)
class _Link:
    stream: ByteStream
    payloads: PayloadSender
    transport: str
    wire_order: WireOrder  # of what is not converted

    def order_of(self, entry: _Entry) -> WireOrder:
        return self.wire_order if entry.wire_dtype is WireDtype.SAME else WireOrder.TOKEN

    def close(self) -> None:
        self.payloads.close()
        self.stream.close()


class PeerSender:
    def __init__(
        self,
        *,
        peer_incarnation: int,
        hello: Hello,
        kv: KVBytes,
        connectors: Mapping[str, Callable[[Endpoint, float], ByteStream]],
        open_payloads: Callable[[str, ByteStream], PayloadSender],
        ladder: Ladder,
        clock: Clock,
        limits: LinkLimits,
    ) -> None:
        """``open_payloads``: for a transport, on its stream after the hellos; raises ``PeerError``."""
        self._peer_incarnation = peer_incarnation
        self._hello = hello
        self._kv = kv
        self._connectors = connectors
        self._open_payloads = open_payloads
        self._ladder = ladder  # the next sender to this peer goes on with it
        self._clock = clock
        self._limits = limits
        self._changed = threading.Condition()
        self._entries: dict[str, _Entry] = {}
        self._aborts: deque[Header] = deque()
        self._abort_reasons: deque[str] = deque()
        self._end_reason = ""
        self._link: _Link | None = None
        self._thread = threading.Thread(target=self._run, name="kv-sender", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        return bool(self._end_reason)

    # ----------------------------------------------------------------- notes

    def open(self, plan: PushPlan, on_done: Callable[[HandoffOutcome], None]) -> bool:
        """False when the link has ended: nothing was taken."""
        with self._changed:
            if self._end_reason:
                return False
            self._entries[plan.request_id] = _Entry(Push(plan, self._kv.layout), on_done)
            self._changed.notify()
            return True

    def layer_written(self, request_id: str, layer: int, num_tokens: int) -> None:
        with self._changed:
            if entry := self._entries.get(request_id):
                entry.push.layer_written(layer, num_tokens)
                self._changed.notify()

    def commit(self, request_id: str, first_token_id: int) -> None:
        with self._changed:
            if entry := self._entries.get(request_id):
                entry.push.commit(first_token_id, self._clock.now_s())
                self._changed.notify()

    def abort(self, request_id: str, reason: str) -> None:
        """Ends the push now, or within ``POLL_S`` when its bytes are just being sent."""
        with self._changed:
            entry = self._entries.get(request_id)
            if entry is None or entry.abort_reason:
                return
            entry.abort_reason = reason
            if entry.is_sending:
                return
            self._note_abort(entry)
        self._done(entry, sealed=False, reason=reason)

    def close(self) -> None:
        self._end("shutdown", is_fault=False)

    # ---------------------------------------------------------- sender thread

    def _run(self) -> None:
        try:
            endpoints = self._first_endpoints()
            if endpoints is None:
                return
            link = self._link_up(endpoints)
            threading.Thread(target=self._read, args=(link,), name="kv-replies", daemon=True).start()
            while self._step(link):
                pass
        except PeerError as error:
            self._end(f"{error.label}: {error}")

    def _first_endpoints(self) -> tuple[Endpoint, ...] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._entries or self._end_reason)
            if self._end_reason:
                return None
            return next(iter(self._entries.values())).push.plan.endpoints

    def _link_up(self, endpoints: tuple[Endpoint, ...]) -> _Link:
        """The first endpoint that works. Raises the last one's ``PeerError``."""
        problem: PeerError = PeerError("decode offers no transport that this worker has")
        with self._changed:
            in_order = self._ladder.in_order(endpoints, self._clock.now_s())
        for endpoint in in_order:
            connect = self._connectors.get(endpoint.transport)
            if connect is None:
                continue
            try:
                link = self._greet(connect(endpoint, self._limits.link_s), endpoint.transport)
            except IncompatiblePeer:
                raise
            except PeerError as error:
                logger.warning("link_failed transport=%s detail=%s", endpoint.transport, error)
                with self._changed:
                    self._demote(endpoint.transport)
                problem = error
                continue
            with self._changed:
                self._link = link
                if self._end_reason:
                    link.close()
            logger.info("link_up transport=%s wire_order=%s", link.transport, link.wire_order.name)
            return link
        raise problem

    def _greet(self, stream: ByteStream, transport: str) -> _Link:
        try:
            return self._agree(stream, transport)
        except PeerError:
            stream.close()
            raise

    def _agree(self, stream: ByteStream, transport: str) -> _Link:
        hello = pack_json(self._hello.as_dict())
        send_frame(stream, Header(FrameKind.HELLO), hello, self._clock)
        header, payload = receive_frame(stream, self._clock, limit_s=self._limits.link_s)
        if header.kind is not FrameKind.HELLO_REPLY:
            raise ProtocolViolation(f"expected HELLO_REPLY, not {header.kind.name}")
        theirs = Hello.from_dict(unpack_json(payload))
        check_compatible(self._hello, theirs)
        if theirs.incarnation != self._peer_incarnation:
            raise PeerError("another process has taken the peer's address")
        payloads = self._open_payloads(transport, stream)
        return _Link(stream, payloads, transport, wire_order(self._hello, theirs))

    def _step(self, link: _Link) -> bool:
        """One action; False when the link has ended."""
        with self._changed:
            self._changed.wait_for(self._has_action, self._until_deadline_s())
            if self._end_reason:
                return False
            aborts = [(self._aborts.popleft(), self._abort_reasons.popleft()) for _ in list(self._aborts)]
            entry = next((entry for entry in self._entries.values() if self._is_actionable(entry)), None)
            segment = None
            is_new = entry is not None and not entry.is_open
            if entry is not None:
                if is_new:
                    entry.wire_dtype = link.payloads.next_wire_dtype()
                entry.is_open = True  # from here on an abort sends ABORT, after the OPEN
                segment = entry.push.next_segment(link.order_of(entry), link.payloads.max_bytes)
        for header, reason in aborts:
            send_frame(link.stream, header, pack_reason(reason), self._clock)
        if entry is not None:
            self._advance(link, entry, segment, is_new=is_new)
        self._check_deadlines()
        return True

    def _has_action(self) -> bool:
        return bool(self._end_reason or self._aborts or any(map(self._is_actionable, self._entries.values())))

    def _is_actionable(self, entry: _Entry) -> bool:
        link = self._link
        assert link is not None, "no link yet"
        if not entry.is_open:
            return True
        if entry.reply_deadline_s < IDLE_FOREVER_S:
            return False
        return entry.push.is_ready_to_commit or entry.push.has_segment(link.order_of(entry))

    def _advance(self, link: _Link, entry: _Entry, segment: Segment | None, *, is_new: bool) -> None:
        plan = entry.push.plan
        if is_new:
            send_frame(
                link.stream, Header(FrameKind.OPEN, plan.reservation_id, plan.fence), plan.ticket, self._clock
            )
        if segment is not None:
            self._send_segment(link, entry, segment)
        with self._changed:
            is_complete = entry.push.is_ready_to_commit and plan.request_id in self._entries
            if is_complete:
                entry.reply_deadline_s = self._clock.now_s() + self._limits.reply_s
        if is_complete:
            header = Header(FrameKind.COMMIT, plan.reservation_id, plan.fence)
            send_frame(link.stream, header, entry.push.commit_frame().pack(), self._clock)

    def _send_segment(self, link: _Link, entry: _Entry, segment: Segment) -> None:
        plan = entry.push.plan
        begin_s = self._clock.now_s()
        order = link.order_of(entry)
        header = Header(
            kind=FrameKind.DATA,
            reservation_id=plan.reservation_id,
            fence=plan.fence,
            payload_bytes=segment.payload_bytes(wire_layout(self._kv.layout, entry.wire_dtype), order),
            sequence=entry.push.num_segments,
            segment=segment,
            wire_order=order,
            wire_dtype=entry.wire_dtype,
        )
        send_all(link.stream, [memoryview(header.pack())], self._clock)
        checksum = self._send_payload(link, entry, header)
        send_all(link.stream, [memoryview(CHECKSUM.pack(checksum))], self._clock)
        with self._changed:
            entry.push.sent(header.payload_bytes, checksum, begin_s=begin_s, end_s=self._clock.now_s())

    def _send_payload(self, link: _Link, entry: _Entry, header: Header) -> int:
        """Its checksum. Only here are blocks read, so only here does an abort have to wait."""
        with self._changed:
            entry.is_sending = not entry.abort_reason
        hold = SourceHold(
            entry.push.plan.block_table,
            is_withdrawn=lambda: bool(entry.abort_reason),
            release=lambda: self._release(entry),
        )
        checksum = link.payloads.send(header, hold)
        self._release(entry)
        return checksum

    def _release(self, entry: _Entry) -> None:
        """No byte of its blocks is being read any more."""
        with self._changed:
            entry.is_sending = False
        if entry.abort_reason:
            self._finish_abort(entry)

    def _finish_abort(self, entry: _Entry) -> None:
        """For an abort that came while the bytes were being sent."""
        with self._changed:
            if self._entries.get(entry.push.plan.request_id) is not entry:
                return
            self._note_abort(entry)
        self._done(entry, sealed=False, reason=entry.abort_reason)

    def _note_abort(self, entry: _Entry) -> None:
        if entry.is_open:
            plan = entry.push.plan
            self._aborts.append(Header(FrameKind.ABORT, plan.reservation_id, plan.fence))
            self._abort_reasons.append(entry.abort_reason)
            self._changed.notify()

    def _until_deadline_s(self) -> float | None:
        deadlines = [entry.reply_deadline_s for entry in self._entries.values()]
        nearest_s = min(deadlines, default=IDLE_FOREVER_S)
        return None if nearest_s == IDLE_FOREVER_S else max(0.0, nearest_s - self._clock.now_s())

    def _check_deadlines(self) -> None:
        now_s = self._clock.now_s()
        with self._changed:
            is_overdue = any(now_s > entry.reply_deadline_s for entry in self._entries.values())
        if is_overdue:
            self._end("no_progress")

    # ---------------------------------------------------------- reader thread

    def _read(self, link: _Link) -> None:
        try:
            while True:
                self._hear(link, *receive_frame(link.stream, self._clock, limit_s=IDLE_FOREVER_S))
        except PeerError as error:
            self._end(f"{error.label}: {error}")

    def _hear(self, link: _Link, header: Header, payload: bytes) -> None:
        if header.kind is FrameKind.TAKEN:
            link.payloads.hear(header)
            return
        with self._changed:
            entry = next(
                (
                    entry
                    for entry in self._entries.values()
                    if entry.push.plan.reservation_id == header.reservation_id
                ),
                None,
            )
        if entry is None:
            return
        match header.kind:
            case FrameKind.SEALED:
                self._done(entry, sealed=True, reason="")
            case FrameKind.ABORTED:
                self.abort(entry.push.plan.request_id, unpack_reason(payload))
            case _:
                raise ProtocolViolation(f"{header.kind.name} is not for prefill")

    # ---------------------------------------------------------------- shared

    def _done(self, entry: _Entry, *, sealed: bool, reason: str) -> None:
        with self._changed:
            if self._entries.get(entry.push.plan.request_id) is not entry:
                return
            del self._entries[entry.push.plan.request_id]
            transport = self._link.transport if self._link else ""
        if self._link is not None:
            self._link.payloads.forget(entry.push.plan.reservation_id)
        entry.on_done(entry.push.outcome(sealed=sealed, reason=reason, transport=transport))

    def _end(self, reason: str, *, is_fault: bool = True) -> None:
        """The link is over: so is every push on it."""
        with self._changed:
            if self._end_reason:
                return
            if self._link is not None:
                if is_fault:
                    self._demote(self._link.transport)
                self._link.close()
            self._end_reason = reason
            entries = list(self._entries.values())
            self._changed.notify()
        logger.info("link_ended peer=%x reason=%s", self._peer_incarnation, reason)
        for entry in entries:
            self._done(entry, sealed=False, reason=reason)

    def _demote(self, transport: str) -> None:
        self._ladder.demote(transport, self._clock.now_s())
        logger.warning("transport_demoted peer=%x transport=%s", self._peer_incarnation, transport)
