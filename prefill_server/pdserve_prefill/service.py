"""Connects sessions, engine and outbox; see the package for the life of a request.

Methods run on the thread their section names. The engine thread owns the hand-offs;
others post to it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from pdserve.clock import Clock
from pdserve.engine.build import BuiltEngine
from pdserve.engine.engine import LayerWritten, StepOutput
from pdserve.engine.loop import EngineLoop
from pdserve.engine.sequence import Sequence
from pdserve.errors import EngineFailure, ProtocolViolation, RequestError
from pdserve.outcomes import OK, SEALED, abort_label
from pdserve.rpc.session import RouterSession, failed
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.tracing import Attributes
from pdserve.transfer import tcp
from pdserve.transfer.hello import Hello
from pdserve.transfer.outbox import Outbox, Ways
from pdserve.transfer.push import HandoffOutcome
from pdserve.transfer.wire_choice import WireOption
from pdserve.worker.directory import RequestDirectory
from pdserve.worker.gpu_ways import gpu_ways
from pdserve.worker.ledger import Ledger
from pdserve.worker.metrics import WorkerMetrics
from pdserve.worker.requests import sequence_from_proto
from pdserve.worker.status import worker_status
from pdserve_prefill.handoffs import Handoff, transfer_attributes
from pdserve_prefill.metrics import TransferMetrics

logger = logging.getLogger(__name__)

INTEGRITY_LIMIT_S = 5.0


class PrefillService:
    def __init__(
        self,
        built: BuiltEngine,
        identity: pb.WorkerIdentity,
        *,
        directory: RequestDirectory,
        ways: Ways,
        event_loop: asyncio.AbstractEventLoop,
        on_broken: Callable[[], None],
        clock: Clock,
        wire_option: WireOption = "same",
    ) -> None:
        """Raises ``ConfigError`` for a ``wire_option`` that this KV pool cannot have."""
        self._engine = built.engine
        self._identity = identity
        self._event_loop = event_loop
        self._clock = clock
        self._directory = directory
        self._handoffs: dict[str, Handoff] = {}
        self._ledger = Ledger()
        self._num_pushed_bytes = 0
        self._transfers = TransferMetrics(self._ledger)
        self.engine_loop = EngineLoop(
            built.engine, on_outputs=self.on_outputs, on_broken=on_broken, clock=clock
        )
        gpu = gpu_ways(built.storage, clock)
        self.outbox = Outbox(
            hello=Hello(identity.incarnation, identity.model_fingerprint, built.storage.layout),
            kv=gpu.kv,
            ways=Ways(
                {**ways.connectors, **dict.fromkeys(gpu.senders, tcp.connect)},
                {**ways.payload_openers, **gpu.senders},
            ),
            clock=clock,
            wire_option=wire_option,
        )
        self.metrics = WorkerMetrics(self.status, self._directory)
        for collector in (self._transfers, *gpu.collectors):
            self.metrics.register(collector)
        built.engine.on_layer_written = self.on_layer_written

    # ------------------------------------------------------------ event loop

    def identity(self) -> pb.WorkerIdentity:
        return self._identity

    def status(self) -> pb.WorkerStatus:
        return worker_status(
            self._identity,
            self.engine_loop,
            num_reserved=len(self._handoffs),
            num_quarantined_blocks=0,
            is_draining=self._directory.is_draining,
            counters={
                "handoffs_sealed": self._ledger.count(SEALED),
                "handoffs_aborted": self._ledger.num_ended - self._ledger.count(SEALED),
                "pushed_bytes": self._num_pushed_bytes,
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
            case "prefill":
                self._admit(message.prefill, session)
            case "release":
                self._release_later(message.release.request_id, message.release.reason)
            case kind:
                raise ProtocolViolation(f"a prefill worker does not take {kind}")

    def session_ended(self, session: RouterSession) -> None:
        for request_id in self._directory.discard_session(session):
            self.engine_loop.post(partial(self._release, request_id, "session_ended"))

    def _admit(self, message: pb.Prefill, session: RouterSession) -> None:
        if self._directory.refuse(message.request_id, session):
            return
        hands_off = message.HasField("handoff")
        sequence = sequence_from_proto(message.request_id, message.sequence, keep_blocks=hands_off)
        self._directory.add(message.request_id, session, traceparent=message.traceparent)
        handoff = Handoff(sequence, message.handoff, self._clock.now_s()) if hands_off else None
        self.engine_loop.post(partial(self._accept, sequence, handoff))

    def _release_later(self, request_id: str, reason: str) -> None:
        if self._directory.discard(request_id, reason):
            self.engine_loop.post(partial(self._release, request_id, reason))

    def _deliver(self, outputs: list[StepOutput], final: set[str]) -> None:
        self._directory.deliver(outputs)
        for request_id in final:
            self._directory.discard(request_id, OK)

    # --------------------------------------------------------- engine thread

    def on_layer_written(self, layer: int, written: LayerWritten) -> None:
        """``written``: sequences of the running step, and up to which token this layer's KV is final."""
        for sequence, num_tokens in written:
            handoff = self._handoffs.get(sequence.seq_id)
            if handoff is None:
                continue
            if not handoff.is_open:
                handoff.is_open = True
                handoff.started_s = self._clock.now_s()
                self.outbox.open(handoff.push_plan(), on_done=self._on_done)
            self.outbox.layer_written(sequence.seq_id, layer, num_tokens)

    def on_outputs(self, outputs: list[StepOutput]) -> None:
        final = {output.seq_id for output in outputs if self._is_final(output)}
        self._event_loop.call_soon_threadsafe(self._deliver, outputs, final)
        for output in outputs:
            self._end_push(output)

    def _is_final(self, output: StepOutput) -> bool:
        """Whether no message follows; a hand-off under way ends with its report."""
        return bool(output.finish_reason) or output.seq_id not in self._handoffs

    def _end_push(self, output: StepOutput) -> None:
        handoff = self._handoffs.get(output.seq_id)
        if handoff is None:
            return
        handoff.first_token_s = self._clock.now_s()
        if not handoff.is_open:  # the step failed before its first layer
            del self._handoffs[output.seq_id]
            self._ledger.end(EngineFailure.label)
        elif output.error is not None:
            self.outbox.abort(output.seq_id, output.error.label)
        elif output.finish_reason:
            self.outbox.abort(output.seq_id, "finished")
        else:
            self.outbox.commit(output.seq_id, output.token_ids[0])

    def _accept(self, sequence: Sequence, handoff: Handoff | None) -> None:
        try:
            self._engine.add(sequence)
        except RequestError as error:
            self._send_last(sequence.seq_id, failed(sequence.seq_id, error))
            return
        if handoff is not None:
            self._handoffs[sequence.seq_id] = handoff
            self._ledger.begin()

    def _release(self, request_id: str, reason: str) -> None:
        logger.info("released request_id=%s reason=%s", request_id, reason)
        handoff = self._handoffs.get(request_id)
        if handoff is not None and handoff.is_open:
            self.outbox.abort(request_id, reason)  # the blocks follow when it is done with them
            return
        if self._handoffs.pop(request_id, None) is not None:
            self._ledger.end(abort_label(reason))
        self._engine.abort(request_id)

    def _handed_off(self, outcome: HandoffOutcome) -> None:
        handoff = self._handoffs.pop(outcome.request_id)
        self._engine.abort(outcome.request_id)
        self._ledger.end(SEALED if outcome.sealed else abort_label(outcome.reason))
        self._num_pushed_bytes += outcome.num_bytes
        self._transfers.handed_off(outcome, handoff)
        self._record(outcome, handoff)
        if not outcome.sealed and outcome.reason != "finished":
            logger.warning("handoff_aborted request_id=%s reason=%s", outcome.request_id, outcome.reason)
        report = pb.FromWorker(handoff=handoff.report(outcome))
        self._send_last(outcome.request_id, report)

    def _record(self, outcome: HandoffOutcome, handoff: Handoff) -> None:
        begin_s, end_s = handoff.started_s, self._clock.now_s()
        spans: tuple[tuple[str, float, float, Attributes], ...] = (
            ("compute", begin_s, handoff.first_token_s or end_s, {}),
            ("transfer", begin_s, end_s, transfer_attributes(outcome)),
        )
        for span in spans:
            self._event_loop.call_soon_threadsafe(self._directory.record, outcome.request_id, *span)

    def _send_last(self, request_id: str, message: pb.FromWorker) -> None:
        self._event_loop.call_soon_threadsafe(self._directory.send_last, request_id, message)

    # ---------------------------------------------------------- link threads

    def _on_done(self, outcome: HandoffOutcome) -> None:
        self.engine_loop.post(partial(self._handed_off, outcome))
