"""One attempt at a sequence: the workers it is on, and what they say about it.

::

    reserve ─► send_prefill ─► heard … heard ─► release      with a hand-off
               send_prefill ─► heard ─────────► release      one token wanted
               send_generate ► heard … heard ─► release      decode alone

Its request id is its own, so nothing late can be taken for the next attempt's.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from pdserve.errors import EngineFailure, PdserveError, PeerError, ProtocolViolation, RequestError, WorkerLost
from pdserve.rpc.convert import pack_token_ids, sampling_to_proto
from pdserve.rpc.ticket import sign_ticket
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.sampling import SamplingParams
from pdserve.timeline import Timeline
from pdserve_router.merge import TokenMerge, Tokens
from pdserve_router.worker_client import Heard, Inbox, WorkerClient

RESERVE_LIMIT_S = 10.0
TICKET_LIFETIME_S = 900


@dataclass(slots=True)
class SequenceRequest:
    """One choice of a request. ``request_id`` is the router's own, unique."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    timeline: Timeline
    traceparent: str = ""


@dataclass(slots=True)
class Progress:
    """What is known of a sequence so far; kept over attempts. ``failed``: addresses of workers."""

    output_token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int | None = None
    handoffs: list[pb.HandoffReport] = field(default_factory=list)
    num_attempts: int = 0
    failure_labels: list[str] = field(default_factory=list)  # of attempts, as in ``pdserve.errors``
    num_fallbacks: int = 0  # to decode alone, where prefill workers are configured
    first_refused_s: float | None = None
    failed: set[str] = field(default_factory=set)

    @property
    def handoff(self) -> pb.HandoffReport | None:
        """The last, which is the only one unless attempts failed."""
        return self.handoffs[-1] if self.handoffs else None

    @property
    def num_failures(self) -> int:
        return len(self.failure_labels)


class AttemptFailed(Exception):
    """Another attempt may succeed. ``error`` is for the client if none does; ``str`` is for the log."""

    def __init__(self, detail: str, *, error: PdserveError, worker: WorkerClient | None = None) -> None:
        super().__init__(detail)
        self.error = error
        self.worker = worker


class NoRoomYet(Exception):
    """The worker has accepted nothing: not a failure, but it has to be asked again."""


class Attempt:
    def __init__(self, request: SequenceRequest, progress: Progress, *, traceparent: str) -> None:
        self.request_id = f"{request.request_id}-{progress.num_attempts}"
        self.inbox: Inbox = asyncio.Queue()
        self.is_finished = False
        self._progress = progress
        self._traceparent = traceparent
        self._merge = TokenMerge(len(progress.output_token_ids))
        self._prefill: WorkerClient | None = None
        self._decode: WorkerClient | None = None
        self._is_handed_off = False
        self._sequence = pb.Sequence(
            prompt_token_ids=pack_token_ids(request.prompt_token_ids),
            output_token_ids=pack_token_ids(progress.output_token_ids),
            sampling=sampling_to_proto(request.sampling),
        )

    async def reserve(self, decode: WorkerClient) -> pb.Reservation | None:
        """None: no room now."""
        self._decode = decode
        reserve = pb.Reserve(
            request_id=self.request_id, sequence=self._sequence, traceparent=self._traceparent
        )
        decode.open(self.request_id, self.inbox, pb.ToWorker(reserve=reserve))
        try:
            async with asyncio.timeout(RESERVE_LIMIT_S):
                heard = await self.inbox.get()
        except TimeoutError:
            raise _failed(decode, f"did not answer Reserve in {RESERVE_LIMIT_S:g} s") from None
        if isinstance(heard.message, pb.FromWorker):
            match heard.message.WhichOneof("message"):
                case "reserved":
                    return heard.message.reserved.reservation
                case "refused":
                    decode.close(self.request_id)
                    return None
        self.heard(heard)
        raise _failed(decode, "answered Reserve with something else")

    def send_prefill(
        self, prefill: WorkerClient, reservation: pb.Reservation | None, *, secret: bytes
    ) -> None:
        self._prefill = prefill
        message = pb.Prefill(
            request_id=self.request_id, sequence=self._sequence, traceparent=self._traceparent
        )
        if reservation is not None:
            ticket = sign_ticket(
                secret,
                request_id=self.request_id,
                reservation=reservation,
                expires_unix_s=int(time.time()) + TICKET_LIFETIME_S,
            )
            message.handoff.CopyFrom(pb.Handoff(reservation=reservation, ticket=ticket))
        prefill.open(self.request_id, self.inbox, pb.ToWorker(prefill=message))

    def send_generate(self, decode: WorkerClient) -> None:
        self._decode = decode
        message = pb.Generate(
            request_id=self.request_id, sequence=self._sequence, traceparent=self._traceparent
        )
        decode.open(self.request_id, self.inbox, pb.ToWorker(generate=message))

    def heard(self, heard: Heard) -> list[Tokens]:
        """The tokens that can be passed on. Raises when the attempt is over without a last token."""
        message = heard.message
        if isinstance(message, pb.SequenceTokens):
            return self._tokens(heard.worker, message)
        if isinstance(message, WorkerLost):
            self._lost(heard.worker, message)
            return []
        match message.WhichOneof("message"):
            case "handoff":
                self._reported(heard.worker, message.handoff)
            case "failed":
                raise _error(heard.worker, message.failed)
            case "refused" if heard.worker is self._decode:
                raise NoRoomYet(message.refused.reason)
            case "refused":
                raise _failed(heard.worker, f"refused: {message.refused.reason}")
        return []

    def _tokens(self, worker: WorkerClient, message: pb.SequenceTokens) -> list[Tokens]:
        if worker is self._decode:
            self._is_handed_off = True
        if self._progress.num_cached_tokens is None:
            self._progress.num_cached_tokens = message.num_cached_tokens
        try:
            return self._merge.add(message)
        except ProtocolViolation as error:
            raise _failed(worker, str(error)) from error

    def _reported(self, worker: WorkerClient, report: pb.HandoffReport) -> None:
        """Nothing of the request remains on this worker."""
        if worker is self._prefill:
            self._progress.handoffs.append(report)
        worker.close(self.request_id)
        if report.sealed:
            self._is_handed_off = True
        elif report.abort_reason != "finished":
            error = PeerError("the prompt's KV cache could not be handed to a decode worker")
            raise AttemptFailed(f"hand-off aborted: {report.abort_reason}", error=error)

    def _lost(self, worker: WorkerClient, error: WorkerLost) -> None:
        """A prefill worker may go when all it had to give has come."""
        if worker is self._prefill and self._is_handed_off and self._merge.has_begun:
            return
        raise AttemptFailed(
            str(error), error=WorkerLost("the worker that served this request was lost"), worker=worker
        )

    def release(self, reason: str) -> None:
        """Idempotent."""
        for worker in (self._prefill, self._decode):
            if worker is not None:
                worker.release(self.request_id, reason)


def _failed(worker: WorkerClient, problem: str) -> AttemptFailed:
    return AttemptFailed(
        f"{worker.address} {problem}", error=PeerError("a worker did not do its part"), worker=worker
    )


def _error(worker: WorkerClient, failed: pb.Failed) -> Exception:
    """A request that is wrong is wrong everywhere; the rest another worker might do better."""
    if failed.error == RequestError.label:
        return RequestError(failed.message)
    detail = f"{worker.address} failed: {failed.error}: {failed.message}"
    if failed.error == EngineFailure.label:
        return AttemptFailed(detail, error=EngineFailure("the engine failed on this request"), worker=worker)
    return AttemptFailed(detail, error=PeerError("a worker failed on this request"), worker=worker)
