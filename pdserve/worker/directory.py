"""Which requests are live, and through which session they came. Owned by the event loop."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from pdserve.engine.engine import StepOutput
from pdserve.errors import ProtocolViolation
from pdserve.outcomes import outcome_label
from pdserve.rpc.session import RouterSession, failed
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.tracing import Attributes, Span, Tracer
from pdserve.worker.ledger import Ledger

RETRY_AFTER_MS = 250


@dataclass(frozen=True, slots=True)
class _Live:
    session: RouterSession
    span: Span


class RequestDirectory:
    """Live requests by id; a request leaves with its last message or with its session."""

    def __init__(self, *, max_num_requests: int, role: str, tracer: Tracer) -> None:
        """``role`` names the span of each request."""
        self._max_num_requests = max_num_requests
        self._role = role
        self._tracer = tracer
        self._live: dict[str, _Live] = {}
        self._emptied = asyncio.Event()
        self.is_draining = False
        self.requests = Ledger()
        self._refusals: Counter[str] = Counter()

    @property
    def refusals(self) -> dict[str, int]:
        """Requests that were not taken, by reason."""
        return dict(self._refusals)

    def refuse(self, request_id: str, session: RouterSession) -> bool:
        """Tells the router when no more are taken now."""
        is_full = len(self._live) >= self._max_num_requests
        if not self.is_draining and not is_full:
            return False
        reason = "draining" if self.is_draining else "too_many_requests"
        self._refusals[reason] += 1
        session.send(refused(request_id, reason))
        return True

    async def wait_empty(self) -> None:
        while self._live:
            self._emptied.clear()
            await self._emptied.wait()

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    def add(self, request_id: str, session: RouterSession, *, traceparent: str) -> None:
        """Raises ``ProtocolViolation`` when the id is live: ids are unique per attempt."""
        if request_id in self._live:
            raise ProtocolViolation(f"request {request_id} is live already")
        span = self._tracer.begin(self._role, parent=traceparent, request_id=request_id)
        self._live[request_id] = _Live(session, span)
        self.requests.begin()

    def discard(self, request_id: str, reason: str) -> bool:
        """Whether it was live; ``reason`` is how it ended, see ``pdserve.outcomes``."""
        live = self._live.pop(request_id, None)
        if live is not None:
            self.requests.end(reason)
            live.span.end(outcome_label(reason))
        if not self._live:
            self._emptied.set()
        return live is not None

    def discard_session(self, session: RouterSession) -> list[str]:
        """The ids of the requests that lose their owner."""
        orphans = [request_id for request_id, live in self._live.items() if live.session is session]
        for request_id in orphans:
            self.discard(request_id, "session_ended")
        return orphans

    def send(self, request_id: str, message: pb.FromWorker) -> None:
        """Nothing happens for a request that is gone: its router has given it up."""
        if live := self._live.get(request_id):
            live.session.send(message)

    def record(
        self, request_id: str, part: str, begin_s: float, end_s: float, attributes: Attributes
    ) -> None:
        """For traces: what a live request's time was spent on."""
        if live := self._live.get(request_id):
            live.span.record(part, begin_s, end_s, attributes)

    def send_last(self, request_id: str, message: pb.FromWorker) -> None:
        self.send(request_id, message)
        self.discard(request_id, _last_reason(message))

    def send_refusal(self, request_id: str, reason: str) -> None:
        """For a request that was taken on and then found no room."""
        self._refusals[reason] += 1
        self.send(request_id, refused(request_id, reason))
        self.discard(request_id, "overloaded")

    def deliver(self, outputs: Iterable[StepOutput]) -> None:
        """One TokenBatch per session for all that moved in a step."""
        batches: dict[RouterSession, pb.TokenBatch] = {}
        for output in outputs:
            live = self._live.get(output.seq_id)
            if live is None:
                continue
            if output.error is not None:
                self.send_last(output.seq_id, failed(output.seq_id, output.error))
                continue
            batches.setdefault(live.session, pb.TokenBatch()).sequences.append(_tokens(output))
        for session, batch in batches.items():
            session.send(pb.FromWorker(tokens=batch))


def refused(request_id: str, reason: str) -> pb.FromWorker:
    return pb.FromWorker(
        refused=pb.Refused(request_id=request_id, reason=reason, retry_after_ms=RETRY_AFTER_MS)
    )


def _last_reason(message: pb.FromWorker) -> str:
    """How a request ends with this message."""
    return message.failed.error if message.HasField("failed") else message.handoff.abort_reason


def _tokens(output: StepOutput) -> pb.SequenceTokens:
    return pb.SequenceTokens(
        request_id=output.seq_id,
        first_index=output.first_index,
        token_ids=output.token_ids,
        logprobs=[
            pb.TokenLogprobs(
                logprob=entry.logprob,
                top_token_ids=entry.top_token_ids,
                top_logprobs=entry.top_logprobs,
            )
            for entry in output.logprobs
        ],
        finish_reason=output.finish_reason,
        num_cached_tokens=output.num_cached_tokens,
    )
