"""One sequence from its prompt to its last token, over whatever workers it takes.

An attempt::

    with prefill workers     Reserve on decode → Prefill with the reservation → tokens of both, merged
    one token wanted         Prefill alone
    without                  Generate on decode

A lost worker or an aborted hand-off ends the attempt; the next carries the tokens so far and
goes on with the one after them. Whatever way an attempt ends, both workers are released. The
last attempt does without a hand-off, in case it is the link that is at fault.

Waiting for tokens has no deadline here: a worker that falls silent is lost, and the request as
a whole has a limit (see ``answer``).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

from pdserve.clock import Clock
from pdserve.errors import Overloaded
from pdserve.outcomes import OK
from pdserve.tracing import Tracer
from pdserve_router.admission import RETRY_AFTER_S, Admission
from pdserve_router.attempt import Attempt, AttemptFailed, NoRoomYet, Progress, SequenceRequest
from pdserve_router.merge import Tokens
from pdserve_router.worker_client import WorkerClient
from pdserve_router.workers import Workers

__all__ = ["Generation", "Progress", "SequenceRequest"]

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
# A worker that is to take over must be there by then; the client is promised an answer within 2 s.
OUTAGE_LIMIT_S = 1.5


class Generation:
    def __init__(
        self, workers: Workers, admission: Admission, *, clock: Clock, tracer: Tracer, queue_limit_s: float
    ) -> None:
        self._workers = workers
        self._admission = admission
        self._clock = clock
        self._tracer = tracer
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
            except AttemptFailed as failure:
                self._note_failure(failure, request, progress)
            except NoRoomYet:
                await self._wait_for_room(progress)

    async def _wait_for_room(self, progress: Progress) -> None:
        """Until asking again makes sense. However often that is, the limit is one."""
        now_s = self._clock.now_s()
        if progress.first_refused_s is None:
            progress.first_refused_s = now_s
        left_s = progress.first_refused_s + self._queue_limit_s - now_s
        async with self._admission.line(left_s):
            await self._workers.wait_for_change(OUTAGE_LIMIT_S)

    def _note_failure(self, failure: AttemptFailed, request: SequenceRequest, progress: Progress) -> None:
        """Raises what the client is told when this was the last attempt."""
        progress.failure_labels.append(failure.error.label)
        if failure.worker is not None:
            progress.failed.add(failure.worker.address)
        logger.warning(
            "attempt_failed request_id=%s attempt=%d num_tokens=%d reason=%s",
            request.request_id,
            progress.num_attempts,
            len(progress.output_token_ids),
            failure,
        )
        if progress.num_failures >= MAX_ATTEMPTS:
            raise failure.error from failure

    async def _attempt(self, request: SequenceRequest, progress: Progress) -> AsyncGenerator[Tokens, None]:
        async with self._placed(request, progress) as attempt:
            while True:
                for tokens in attempt.heard(await attempt.inbox.get()):
                    # Before the yield: the reader may take the last tokens and go.
                    attempt.is_finished = bool(tokens.finish_reason)
                    yield tokens
                    if attempt.is_finished:
                        return

    @asynccontextmanager
    async def _placed(self, request: SequenceRequest, progress: Progress) -> AsyncIterator[Attempt]:
        span = self._tracer.begin("attempt", parent=request.traceparent, request_id=request.request_id)
        attempt = Attempt(request, progress, traceparent=span.traceparent)
        try:
            await self._place(attempt, request, progress)
            if request.timeline.reserved_s is None:
                request.timeline.reserved_s = self._clock.now_s()
            yield attempt
        except (AttemptFailed, NoRoomYet) as failure:
            attempt.release("retry")
            span.end(failure.error.label if isinstance(failure, AttemptFailed) else Overloaded.label)
            raise
        finally:
            attempt.release("finished" if attempt.is_finished else "cancelled")
            span.end(OK if attempt.is_finished else "cancelled")

    # ------------------------------------------------------------- placement

    async def _place(self, attempt: Attempt, request: SequenceRequest, progress: Progress) -> None:
        """Finds workers with room, waiting in line for it if need be."""
        nobody_waits = self._admission.num_waiting == 0
        if nobody_waits and await self._try_place(attempt, request, progress):
            return
        async with self._admission.line(self._queue_limit_s):
            while not await self._try_place(attempt, request, progress):
                if self._workers.outage_s >= OUTAGE_LIMIT_S:
                    raise Overloaded("no decode worker is ready", retry_after_s=RETRY_AFTER_S)
                await self._workers.wait_for_change(OUTAGE_LIMIT_S)

    async def _try_place(self, attempt: Attempt, request: SequenceRequest, progress: Progress) -> bool:
        """False: not now."""
        num_wanted = request.sampling.max_tokens - len(progress.output_token_ids)
        prefill = self._prefill_worker(progress)
        if prefill is not None and num_wanted == 1:
            attempt.send_prefill(prefill, None, secret=self._workers.secret)
            return True
        for decode in self._workers.ready_decode(progress.failed):
            if prefill is None:
                progress.num_fallbacks += bool(self._workers.prefill)
                attempt.send_generate(decode)
                return True
            reservation = await attempt.reserve(decode)
            if reservation is not None:
                attempt.send_prefill(prefill, reservation, secret=self._workers.secret)
                return True
        return False

    def _prefill_worker(self, progress: Progress) -> WorkerClient | None:
        """None: decode does it all."""
        if progress.num_failures == MAX_ATTEMPTS - 1:
            return None
        return next(iter(self._workers.ready_prefill(progress.failed)), None)
