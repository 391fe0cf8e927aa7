"""Connects sessions, engine and outbox; see the package for the life of a request.

Methods run on the thread their section names. The engine thread owns the hand-offs;
others post to it.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from pdserve.clock import Clock
from pdserve.engine.engine import Engine, StepOutput
from pdserve.engine.loop import EngineLoop
from pdserve.engine.sequence import Sequence
from pdserve.errors import ProtocolViolation, RequestError
from pdserve.rpc.session import Session, failed
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.transfer.outbox import HandoffOutcome, Outbox
from pdserve.worker.directory import RequestDirectory
from pdserve.worker.requests import sequence_from_proto
from pdserve_prefill.handoffs import Handoff

logger = logging.getLogger(__name__)

RETRY_AFTER_MS = 250


class PrefillService:
    def __init__(
        self,
        *,
        engine: Engine,
        engine_loop: EngineLoop,
        outbox: Outbox,
        event_loop: asyncio.AbstractEventLoop,
        clock: Clock,
        max_num_requests: int,
    ) -> None:
        self._engine = engine
        self._engine_loop = engine_loop
        self._outbox = outbox
        self._event_loop = event_loop
        self._clock = clock
        self._max_num_requests = max_num_requests
        self._directory = RequestDirectory()
        self._handoffs: dict[str, Handoff] = {}
        self.is_draining = False

    # ------------------------------------------------------------ event loop

    @property
    def num_requests(self) -> int:
        return len(self._directory)

    def handle(self, message: pb.ToWorker, session: Session) -> None:
        match message.WhichOneof("message"):
            case "prefill":
                self._admit(message.prefill, session)
            case "release":
                self._release_later(message.release.request_id, message.release.reason)
            case kind:
                raise ProtocolViolation(f"a prefill worker does not take {kind}")

    def session_ended(self, session: Session) -> None:
        for request_id in self._directory.discard_session(session):
            self._engine_loop.post(partial(self._release, request_id, "session_ended"))

    def _admit(self, message: pb.Prefill, session: Session) -> None:
        refusal = self._refusal()
        if refusal:
            refused = pb.Refused(
                request_id=message.request_id, reason=refusal, retry_after_ms=RETRY_AFTER_MS
            )
            session.send(pb.FromWorker(refused=refused))
            return
        hands_off = message.HasField("handoff")
        sequence = sequence_from_proto(message.request_id, message.sequence, keep_blocks=hands_off)
        self._directory.add(message.request_id, session)
        handoff = Handoff(sequence, message.handoff, self._clock.now_s()) if hands_off else None
        self._engine_loop.post(partial(self._accept, sequence, handoff))

    def _refusal(self) -> str:
        if self.is_draining:
            return "draining"
        return "too_many_requests" if len(self._directory) >= self._max_num_requests else ""

    def _release_later(self, request_id: str, reason: str) -> None:
        if self._directory.discard(request_id):
            self._engine_loop.post(partial(self._release, request_id, reason))

    def _deliver(self, outputs: list[StepOutput], final: set[str]) -> None:
        self._directory.deliver(outputs)
        for request_id in final:
            self._directory.discard(request_id)

    # --------------------------------------------------------- engine thread

    def on_layer_written(self, layer: int, written: list[tuple[Sequence, int]]) -> None:
        """``written``: sequences of the running step, and up to which token this layer's KV is final."""
        for sequence, num_tokens in written:
            handoff = self._handoffs.get(sequence.seq_id)
            if handoff is None:
                continue
            if not handoff.is_open:
                handoff.is_open = True
                handoff.started_s = self._clock.now_s()
                self._outbox.open(handoff.push_plan(), on_done=self._on_done)
            self._outbox.layer_written(sequence.seq_id, layer, num_tokens)

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
        elif output.error is not None:
            self._outbox.abort(output.seq_id, output.error.label)
        elif output.finish_reason:
            self._outbox.abort(output.seq_id, "finished")
        else:
            self._outbox.commit(output.seq_id, output.token_ids[0])

    def _accept(self, sequence: Sequence, handoff: Handoff | None) -> None:
        try:
            self._engine.add(sequence)
        except RequestError as error:
            self._send_last(sequence.seq_id, failed(sequence.seq_id, error))
            return
        if handoff is not None:
            self._handoffs[sequence.seq_id] = handoff

    def _release(self, request_id: str, reason: str) -> None:
        handoff = self._handoffs.get(request_id)
        if handoff is not None and handoff.is_open:
            self._outbox.abort(request_id, reason)  # the blocks follow when it is done with them
            return
        self._handoffs.pop(request_id, None)
        self._engine.abort(request_id)
        self._engine.free(request_id)

    def _handed_off(self, outcome: HandoffOutcome) -> None:
        handoff = self._handoffs.pop(outcome.request_id)
        self._engine.abort(outcome.request_id)
        self._engine.free(outcome.request_id)
        if not outcome.sealed and outcome.reason != "finished":
            logger.warning("handoff_aborted request_id=%s reason=%s", outcome.request_id, outcome.reason)
        report = pb.FromWorker(handoff=handoff.report(outcome))
        self._send_last(outcome.request_id, report)

    def _send_last(self, request_id: str, message: pb.FromWorker) -> None:
        self._event_loop.call_soon_threadsafe(self._directory.send_last, request_id, message)

    # ---------------------------------------------------------- link threads

    def _on_done(self, outcome: HandoffOutcome) -> None:
        self._engine_loop.post(partial(self._handed_off, outcome))
