"""One sequence from its prompt to its last token, over whatever workers it takes.

An attempt::

    with prefill workers     Reserve on decode → Prefill with the reservation → tokens of both, merged
    one token wanted         Prefill alone
    without                  Generate on decode

A lost worker or an aborted hand-off ends the attempt; the next carries the tokens so far and
goes on with the one after them. Whatever way an attempt ends, both workers are released.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

from pdserve.clock import Clock
from pdserve.errors import EngineFailure, Overloaded, PdserveError, PeerError, RequestError, WorkerLost
from pdserve.rpc.convert import pack_token_ids, sampling_to_proto
from pdserve.rpc.ticket import sign_ticket
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.sampling import SamplingParams
from pdserve.timeline import Timeline
from pdserve_router.admission import RETRY_AFTER_S, Admission
from pdserve_router.merge import TokenMerge, Tokens
from pdserve_router.worker_client import Heard, Inbox, WorkerClient
from pdserve_router.workers import Workers

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
# A worker that is to take over must be there by then; the client is promised an answer within 2 s.
REPLACEMENT_LIMIT_S = 1.5
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
    """What is known of a sequence so far; kept over attempts."""

    output_token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int | None = None
    handoff: pb.HandoffReport | None = None
    num_attempts: int = 0


class AttemptFailed(PeerError):
    """This attempt is over, another may succeed."""


class Generation:
    def __init__(self, workers: Workers, admission: Admission, *, clock: Clock, queue_limit_s: float) -> None:
        self._workers = workers
        self._admission = admission
        self._clock = clock
        self._queue_limit_s = queue_limit_s

    async def tokens(self, request: SequenceRequest, progress: Progress) -> AsyncGenerator[Tokens, None]:
        """The sequence's tokens as they come. Raises ``PdserveError``; closing the iterator releases all."""
        while True:
            progress.num_attempts += 1
            try:
                # Closed by name: a generator left to the collector would release the workers late.
                async with aclosing(self._attempt(request, progress)) as attempt:
                    async for tokens in attempt:
                        request.timeline.tokens(len(tokens.token_ids), self._clock.now_s())
                        progress.output_token_ids += tokens.token_ids
                        yield tokens
                return
            except (AttemptFailed, WorkerLost) as error:
                if progress.num_attempts >= MAX_ATTEMPTS:
                    raise
                logger.warning(
                    "retry request_id=%s attempt=%d num_tokens=%d reason=%s",
                    request.request_id,
                    progress.num_attempts,
                    len(progress.output_token_ids),
                    error,
                )

    async def _attempt(self, request: SequenceRequest, progress: Progress) -> AsyncGenerator[Tokens, None]:
        async with self._opened(request, progress) as attempt:
            while True:
                for tokens in attempt.heard(await attempt.inbox.get()):
                    yield tokens
                    if tokens.finish_reason:
                        attempt.is_finished = True
                        return

    @asynccontextmanager
    async def _opened(self, request: SequenceRequest, progress: Progress) -> AsyncIterator[_Attempt]:
        attempt = _Attempt(request, progress)
        try:
            await self._place(attempt)
            if request.timeline.reserved_s is None:
                request.timeline.reserved_s = self._clock.now_s()
            yield attempt
        finally:
            attempt.release()

    # ------------------------------------------------------------- placement

    async def _place(self, attempt: _Attempt) -> None:
        """Finds workers with room, waiting in line for it if need be."""
        if not self._admission.is_contended and await self._try_place(attempt):
            return
        async with self._admission.line():
            deadline_s = self._clock.now_s() + self._queue_limit_s
            while not await self._try_place(attempt):
                left_s = deadline_s - self._clock.now_s()
                if left_s <= 0:
                    raise Overloaded(
                        f"no worker had room for {self._queue_limit_s:g} s", retry_after_s=RETRY_AFTER_S
                    )
                await self._workers.wait_for_change(left_s)

    async def _try_place(self, attempt: _Attempt) -> bool:
        """False: not now. Raises ``Overloaded`` or ``WorkerLost`` when there is nobody to ask."""
        prefill = self._workers.pick_prefill()
        if prefill is not None and attempt.num_wanted == 1:
            attempt.send_prefill(prefill, None, self._workers.secret)
            return True
        decode = await self._decode_worker(attempt)
        if prefill is None or not prefill.is_ready:
            attempt.send_generate(decode)
            return True
        reservation = await attempt.reserve(decode)
        if reservation is None:
            return False
        attempt.send_prefill(prefill, reservation, self._workers.secret)
        return True

    async def _decode_worker(self, attempt: _Attempt) -> WorkerClient:
        deadline_s = self._clock.now_s() + REPLACEMENT_LIMIT_S
        while (decode := self._workers.pick_decode()) is None:
            left_s = deadline_s - self._clock.now_s()
            if left_s <= 0:
                problem = "; ".join(self._workers.problems())
                if attempt.progress.num_attempts > 1:
                    raise WorkerLost(f"the request's worker was lost and nobody can take over: {problem}")
                raise Overloaded(problem, retry_after_s=RETRY_AFTER_S)
            await self._workers.wait_for_change(left_s)
        return decode


class _Attempt:
    """The workers a sequence is on, and what they say about it."""

    def __init__(self, request: SequenceRequest, progress: Progress) -> None:
        self.request_id = f"{request.request_id}-{progress.num_attempts}"
        self.progress = progress
        self.inbox: Inbox = asyncio.Queue()
        self.is_finished = False
        self._request = request
        self._merge = TokenMerge(len(progress.output_token_ids))
        self._prefill: WorkerClient | None = None
        self._decode: WorkerClient | None = None
        self._is_handed_off = False
        self._sequence = pb.Sequence(
            prompt_token_ids=pack_token_ids(request.prompt_token_ids),
            output_token_ids=pack_token_ids(progress.output_token_ids),
            sampling=sampling_to_proto(request.sampling),
        )

    @property
    def num_wanted(self) -> int:
        return self._request.sampling.max_tokens - len(self.progress.output_token_ids)

    async def reserve(self, decode: WorkerClient) -> pb.Reservation | None:
        """None: no room now."""
        self._decode = decode
        reserve = pb.Reserve(
            request_id=self.request_id, sequence=self._sequence, traceparent=self._request.traceparent
        )
        decode.open(self.request_id, self.inbox, pb.ToWorker(reserve=reserve))
        try:
            async with asyncio.timeout(RESERVE_LIMIT_S):
                heard = await self.inbox.get()
        except TimeoutError:
            raise AttemptFailed(f"{decode.address} did not answer Reserve in {RESERVE_LIMIT_S:g} s") from None
        message = heard.message
        if isinstance(message, pb.FromWorker) and message.HasField("reserved"):
            return message.reserved.reservation
        if isinstance(message, pb.FromWorker) and message.HasField("refused"):
            decode.close(self.request_id)
            self._decode = None
            return None
        self.heard(heard)
        raise AttemptFailed(f"{decode.address} answered Reserve with something else")

    def send_prefill(self, prefill: WorkerClient, reservation: pb.Reservation | None, secret: bytes) -> None:
        self._prefill = prefill
        message = pb.Prefill(
            request_id=self.request_id, sequence=self._sequence, traceparent=self._request.traceparent
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
        self._is_handed_off = True  # there is nothing to hand off
        message = pb.Generate(
            request_id=self.request_id, sequence=self._sequence, traceparent=self._request.traceparent
        )
        decode.open(self.request_id, self.inbox, pb.ToWorker(generate=message))

    def heard(self, heard: Heard) -> list[Tokens]:
        """The tokens that can be passed on. Raises ``PdserveError`` when the attempt is over."""
        message = heard.message
        if isinstance(message, WorkerLost):
            return self._lost(heard.worker, message)
        if isinstance(message, pb.SequenceTokens):
            return self._tokens(heard.worker, message)
        match message.WhichOneof("message"):
            case "handoff":
                self._handed_off(heard.worker, message.handoff)
            case "failed":
                raise _error(message.failed)
            case "refused":
                raise AttemptFailed(f"{heard.worker.address} refused: {message.refused.reason}")
        return []

    def _tokens(self, worker: WorkerClient, message: pb.SequenceTokens) -> list[Tokens]:
        if worker is self._decode:
            self._is_handed_off = True
        if self.progress.num_cached_tokens is None:
            self.progress.num_cached_tokens = message.num_cached_tokens
        return self._merge.add(message)

    def _handed_off(self, worker: WorkerClient, report: pb.HandoffReport) -> None:
        if worker is self._prefill:
            self.progress.handoff = report
        worker.close(self.request_id)
        if report.sealed:
            self._is_handed_off = True
        elif report.abort_reason != "finished":
            raise AttemptFailed(f"the hand-off was aborted: {report.abort_reason}")

    def _lost(self, worker: WorkerClient, error: WorkerLost) -> list[Tokens]:
        """A prefill worker that has handed off may go."""
        if worker is self._prefill and self._is_handed_off:
            return []
        raise error

    def release(self) -> None:
        reason = "finished" if self.is_finished else "given_up"
        for worker in (self._prefill, self._decode):
            if worker is not None:
                worker.release(self.request_id, reason)


def _error(failed: pb.Failed) -> PdserveError:
    """A worker's refusal becomes ours; anything that another worker might do better is retried."""
    match failed.error:
        case RequestError.label:
            return RequestError(failed.message)
        case EngineFailure.label:
            return EngineFailure(failed.message)
        case _:
            return AttemptFailed(failed.message)
