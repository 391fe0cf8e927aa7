"""Connects sessions, engine and landing table; see the package for the life of a request.

Methods run on the thread their section names. The engine thread owns the reservations;
others post to it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial

from pdserve.clock import Clock
from pdserve.engine.build import BuiltEngine
from pdserve.engine.engine import StepOutput
from pdserve.engine.loop import EngineLoop
from pdserve.engine.sequence import Sequence
from pdserve.errors import ProtocolViolation, RequestError
from pdserve.outcomes import OK, SEALED, abort_label
from pdserve.rpc.session import RouterSession, failed
from pdserve.rpc.ticket import verify_ticket
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.transfer.hello import Hello
from pdserve.transfer.landing import LandingPlan, LandingTable
from pdserve.worker.directory import RequestDirectory
from pdserve.worker.gpu_ways import gpu_ways
from pdserve.worker.ledger import Ledger
from pdserve.worker.metrics import WorkerMetrics
from pdserve.worker.requests import sequence_from_proto
from pdserve.worker.status import worker_status
from pdserve_decode.metrics import LandingCollector
from pdserve_decode.reservations import Grant, Reservations

logger = logging.getLogger(__name__)

DRAIN_LIMIT_S = 2.0
INTEGRITY_LIMIT_S = 5.0


class DecodeService:
    def __init__(
        self,
        built: BuiltEngine,
        identity: pb.WorkerIdentity,
        *,
        directory: RequestDirectory,
        secret: bytes,
        lease_s: float,
        event_loop: asyncio.AbstractEventLoop,
        on_broken: Callable[[], None],
        clock: Clock,
    ) -> None:
        self._engine = built.engine
        self._identity = identity
        self._secret = secret
        self._lease_ms = round(lease_s * 1000)
        self._event_loop = event_loop
        self._clock = clock
        self._directory = directory
        self._reservations = Reservations(
            decode_incarnation=identity.incarnation, drain_limit_s=DRAIN_LIMIT_S, clock=clock
        )
        self._endpoints: list[pb.Endpoint] = []
        self._ledger = Ledger()
        self._num_quarantined_blocks = 0
        self.engine_loop = EngineLoop(
            built.engine, on_outputs=self.on_outputs, on_broken=on_broken, clock=clock
        )
        self.gpu_ways = gpu_ways(built.storage, clock)
        self.landing = LandingTable(
            hello=Hello(identity.incarnation, identity.model_fingerprint, built.storage.layout),
            kv=self.gpu_ways.kv,
            verify_ticket=self._verify_ticket,
            on_sealed=self.on_sealed,
            on_aborted=self.on_aborted,
        )
        self.metrics = WorkerMetrics(self.status, self._directory)
        for collector in (LandingCollector(self._ledger, self.landing), *self.gpu_ways.collectors):
            self.metrics.register(collector)

    def offer(self, endpoints: list[pb.Endpoint]) -> None:
        """The ways in for KV, in order of preference; known once the listeners are bound."""
        self._endpoints = endpoints

    # ------------------------------------------------------------ event loop

    def identity(self) -> pb.WorkerIdentity:
        return self._identity

    def status(self) -> pb.WorkerStatus:
        return worker_status(
            self._identity,
            self.engine_loop,
            num_reserved=self.landing.num_expected,
            num_quarantined_blocks=self._num_quarantined_blocks,
            is_draining=self._directory.is_draining,
            counters={
                "handoffs_sealed": self._ledger.count(SEALED),
                "handoffs_aborted": self._ledger.num_ended - self._ledger.count(SEALED),
                "landed_bytes": self.landing.num_bytes,
                **{f"dropped_{reason}": count for reason, count in self.landing.dropped().items()},
            },
        )

    def start_draining(self) -> None:
        self._directory.is_draining = True

    async def wait_idle(self) -> None:
        await self._directory.wait_empty()

    async def check_integrity(self) -> None:
        check = self.engine_loop.call(self._engine.check_integrity)
        async with asyncio.timeout(INTEGRITY_LIMIT_S):
            await asyncio.wrap_future(check)

    def handle(self, message: pb.ToWorker, session: RouterSession) -> None:
        match message.WhichOneof("message"):
            case "reserve":
                self._admit(message.reserve, session, self._reserve)
            case "generate":
                self._admit(message.generate, session, self._generate)
            case "release":
                self._release_later(message.release.request_id, message.release.reason)
            case kind:
                raise ProtocolViolation(f"a decode worker does not take {kind}")

    def session_ended(self, session: RouterSession) -> None:
        for request_id in self._directory.discard_session(session):
            self.engine_loop.post(partial(self._release, request_id, "session_ended"))

    def _admit(
        self,
        message: pb.Reserve | pb.Generate,
        session: RouterSession,
        accept: Callable[[Sequence], None],
    ) -> None:
        if self._directory.refuse(message.request_id, session):
            return
        sequence = sequence_from_proto(message.request_id, message.sequence)
        self._directory.add(message.request_id, session, traceparent=message.traceparent)
        self.engine_loop.post(partial(self._accept, accept, sequence))

    def _release_later(self, request_id: str, reason: str) -> None:
        if self._directory.discard(request_id, reason):
            self.engine_loop.post(partial(self._release, request_id, reason))

    def _deliver(self, outputs: list[StepOutput]) -> None:
        self._directory.deliver(outputs)
        for output in outputs:
            if output.finish_reason:
                self._directory.discard(output.seq_id, OK)

    # --------------------------------------------------------- engine thread

    def on_outputs(self, outputs: list[StepOutput]) -> None:
        self._event_loop.call_soon_threadsafe(self._deliver, outputs)

    def _accept(self, accept: Callable[[Sequence], None], sequence: Sequence) -> None:
        try:
            accept(sequence)
        except RequestError as error:
            self._send_last(sequence.seq_id, failed(sequence.seq_id, error))

    def _generate(self, sequence: Sequence) -> None:
        self._engine.add(sequence)

    def _reserve(self, sequence: Sequence) -> None:
        if not self._engine.hold(sequence):
            self._event_loop.call_soon_threadsafe(
                self._directory.send_refusal, sequence.seq_id, "no_free_blocks"
            )
            return
        grant = self._reservations.grant(sequence.seq_id, num_blocks=len(sequence.block_table))
        self._ledger.begin()
        self.landing.expect(
            LandingPlan(
                request_id=grant.request_id,
                reservation_id=grant.reservation_id,
                fence=grant.fence,
                decode_incarnation=grant.decode_incarnation,
                num_tokens=sequence.num_tokens,
                num_cached_tokens=sequence.num_cached_tokens,
                block_table=tuple(sequence.block_table),
            )
        )
        self._send(sequence.seq_id, self._reserved(grant, sequence))

    def _reserved(self, grant: Grant, sequence: Sequence) -> pb.FromWorker:
        reservation = pb.Reservation(
            reservation_id=grant.reservation_id,
            fence=grant.fence,
            decode_incarnation=grant.decode_incarnation,
            num_tokens=sequence.num_tokens,
            num_cached_tokens=sequence.num_cached_tokens,
            endpoints=self._endpoints,
        )
        return pb.FromWorker(
            reserved=pb.Reserved(
                request_id=grant.request_id, reservation=reservation, lease_ms=self._lease_ms
            )
        )

    def _sealed(self, reservation_id: int, first_token_id: int) -> None:
        grant = self._reservations.seal(reservation_id)
        if grant is None:
            return
        self._ledger.end(SEALED)
        self._record(grant, SEALED)
        self._engine.adopt(grant.request_id, first_token_id)

    def _aborted(self, reservation_id: int, reason: str) -> None:
        grant = self._reservations.drain(reservation_id)
        if grant is None:
            return
        logger.warning("handoff_aborted request_id=%s reason=%s", grant.request_id, reason)
        self._drain(grant, reason)
        self._record(grant, abort_label(reason))
        report = pb.HandoffReport(request_id=grant.request_id, sealed=False, abort_reason=reason)
        self._send_last(grant.request_id, pb.FromWorker(handoff=report))

    def _release(self, request_id: str, reason: str) -> None:
        logger.info("released request_id=%s reason=%s", request_id, reason)
        grant = self._reservations.of_request(request_id)
        if grant is None:
            self._engine.abort(request_id)
            return
        self._reservations.drain(grant.reservation_id)
        self._drain(grant, reason)

    def _record(self, grant: Grant, outcome: str) -> None:
        span = ("receive", grant.granted_s, self._clock.now_s(), {"outcome": outcome})
        self._event_loop.call_soon_threadsafe(self._directory.record, grant.request_id, *span)

    def _drain(self, grant: Grant, reason: str) -> None:
        self._ledger.end(abort_label(reason))
        quiet = partial(self.engine_loop.post, partial(self._quiet, grant.reservation_id))
        self.landing.withdraw(grant.reservation_id, on_quiet=quiet)
        self._event_loop.call_soon_threadsafe(
            self._event_loop.call_later, DRAIN_LIMIT_S + 0.1, self.engine_loop.post, self._quarantine_overdue
        )

    def _quarantine_overdue(self) -> None:
        for grant in self._reservations.quarantine_overdue():
            logger.error("quarantined request_id=%s num_blocks=%d", grant.request_id, grant.num_blocks)
        self._num_quarantined_blocks = self._reservations.num_quarantined_blocks

    def _quiet(self, reservation_id: int) -> None:
        grant = self._reservations.quiet(reservation_id)
        self._num_quarantined_blocks = self._reservations.num_quarantined_blocks
        self._engine.abort(grant.request_id)

    def _send(self, request_id: str, message: pb.FromWorker) -> None:
        self._event_loop.call_soon_threadsafe(self._directory.send, request_id, message)

    def _send_last(self, request_id: str, message: pb.FromWorker) -> None:
        self._event_loop.call_soon_threadsafe(self._directory.send_last, request_id, message)

    # ---------------------------------------------------------- link threads

    def _verify_ticket(self, ticket: bytes, plan: LandingPlan) -> None:
        verify_ticket(
            ticket,
            secret=self._secret,
            request_id=plan.request_id,
            reservation=plan,
            now_unix_s=time.time(),  # only judges the expiry of tickets
        )

    def on_sealed(self, reservation_id: int, first_token_id: int) -> None:
        self.engine_loop.post(partial(self._sealed, reservation_id, first_token_id))

    def on_aborted(self, reservation_id: int, reason: str) -> None:
        self.engine_loop.post(partial(self._aborted, reservation_id, reason))
