"""Connects sessions, engine and landing table; see the package for the life of a request.

Methods run on the thread their section names. The engine thread owns the reservations;
others post to it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence as SequenceOf
from functools import partial

from pdserve.engine.engine import Engine, StepOutput
from pdserve.engine.loop import EngineLoop
from pdserve.engine.sequence import Sequence
from pdserve.errors import PdserveError, ProtocolViolation, RequestError
from pdserve.rpc.session import Session, failed
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.transfer.landing import LandingPlan, LandingTable
from pdserve.worker.directory import RequestDirectory
from pdserve.worker.requests import sequence_from_proto
from pdserve_decode.reservations import Grant, Phase, Reservations

logger = logging.getLogger(__name__)

RETRY_AFTER_MS = 250


class DecodeService:
    def __init__(
        self,
        *,
        engine: Engine,
        engine_loop: EngineLoop,
        landing: LandingTable,
        reservations: Reservations,
        endpoints: SequenceOf[pb.Endpoint],
        event_loop: asyncio.AbstractEventLoop,
        lease_s: float,
        max_num_requests: int,
    ) -> None:
        self._engine = engine
        self._engine_loop = engine_loop
        self._landing = landing
        self._reservations = reservations
        self._endpoints = endpoints
        self._event_loop = event_loop
        self._lease_ms = round(lease_s * 1000)
        self._max_num_requests = max_num_requests
        self._directory = RequestDirectory()
        self.is_draining = False

    # ------------------------------------------------------------ event loop

    @property
    def num_requests(self) -> int:
        return len(self._directory)

    def handle(self, message: pb.ToWorker, session: Session) -> None:
        match message.WhichOneof("message"):
            case "reserve":
                self._admit(message.reserve.request_id, message.reserve.sequence, session, self._reserve)
            case "generate":
                self._admit(message.generate.request_id, message.generate.sequence, session, self._generate)
            case "release":
                self._release_later(message.release.request_id, message.release.reason)
            case kind:
                raise ProtocolViolation(f"a decode worker does not take {kind}")

    def session_ended(self, session: Session) -> None:
        for request_id in self._directory.discard_session(session):
            self._engine_loop.post(partial(self._release, request_id, "session_ended"))

    def _admit(
        self,
        request_id: str,
        wire_sequence: pb.Sequence,
        session: Session,
        accept: Callable[[Sequence], None],
    ) -> None:
        refusal = self._refusal()
        if refusal:
            session.send(_refused(request_id, refusal))
            return
        sequence = sequence_from_proto(request_id, wire_sequence)
        self._directory.add(request_id, session)
        self._engine_loop.post(partial(self._accept, accept, sequence))

    def _refusal(self) -> str:
        if self.is_draining:
            return "draining"
        return "too_many_requests" if len(self._directory) >= self._max_num_requests else ""

    def _release_later(self, request_id: str, reason: str) -> None:
        if self._directory.discard(request_id):
            self._engine_loop.post(partial(self._release, request_id, reason))

    def _deliver(self, outputs: list[StepOutput]) -> None:
        self._directory.deliver(outputs)
        for output in outputs:
            if output.finish_reason:
                self._directory.discard(output.seq_id)

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
            self._send_last(sequence.seq_id, _refused(sequence.seq_id, "no_free_blocks"))
            return
        grant = self._reservations.grant(sequence.seq_id)
        self._landing.expect(
            LandingPlan(
                request_id=grant.request_id,
                reservation_id=grant.reservation_id,
                fence=grant.fence,
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
        output = self._engine.adopt(grant.request_id, first_token_id)
        if output is not None:
            self.on_outputs([output])

    def _aborted(self, reservation_id: int, reason: str) -> None:
        grant = self._reservations.drain(reservation_id)
        if grant is None:
            return
        logger.warning("handoff_aborted request_id=%s reason=%s", grant.request_id, reason)
        self._drain(grant, reason)
        report = pb.HandoffReport(request_id=grant.request_id, sealed=False, abort_reason=reason)
        self._send_last(grant.request_id, pb.FromWorker(handoff=report))

    def _release(self, request_id: str, reason: str) -> None:
        grant = self._reservations.of_request(request_id)
        if grant is None:
            self._engine.abort(request_id)
            return
        self._reservations.drain(grant.reservation_id)
        self._drain(grant, reason)

    def _drain(self, grant: Grant, reason: str) -> None:
        quiet = partial(self._engine_loop.post, partial(self._quiet, grant.reservation_id))
        self._landing.withdraw(grant.reservation_id, reason, on_quiet=quiet)

    def _quiet(self, reservation_id: int) -> None:
        grant = self._reservations.quiet(reservation_id)
        self._engine.abort(grant.request_id)

    def _send(self, request_id: str, message: pb.FromWorker) -> None:
        self._event_loop.call_soon_threadsafe(self._directory.send, request_id, message)

    def _send_last(self, request_id: str, message: pb.FromWorker) -> None:
        self._event_loop.call_soon_threadsafe(self._directory.send_last, request_id, message)

    # ---------------------------------------------------------- link threads

    def on_sealed(self, reservation_id: int, first_token_id: int) -> None:
        self._engine_loop.post(partial(self._sealed, reservation_id, first_token_id))

    def on_aborted(self, reservation_id: int, reason: str) -> None:
        self._engine_loop.post(partial(self._aborted, reservation_id, reason))


def _refused(request_id: str, reason: str) -> pb.FromWorker:
    return pb.FromWorker(
        refused=pb.Refused(request_id=request_id, reason=reason, retry_after_ms=RETRY_AFTER_MS)
    )
