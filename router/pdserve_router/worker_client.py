"""The router's end of a Session with one worker.

Life::

    connecting ──► attached ──► lost ──► connecting …   (back-off 0.1 s doubling to 0.5 s)

A worker is lost when its stream ends or it is silent for ``SILENCE_LIMIT_S``. Each request it
had then gets a ``WorkerLost`` in its inbox; one whose engine stands still for
``STUCK_LIMIT_S`` is treated alike, but keeps its session. Requests are never sent to a worker
that is not attached, so after a restart nothing of the old process is left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import grpc

from pdserve.errors import ProtocolViolation, WorkerLost
from pdserve.rpc import auth
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.rpc.v1 import worker_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)

HEARTBEAT_PERIOD_S = 0.5
SILENCE_LIMIT_S = 3.0
# An engine ticks at every layer, so this is not a long prompt.
STUCK_LIMIT_S = 10.0
ATTACH_LIMIT_S = 5.0
MIN_BACKOFF_S = 0.1
MAX_BACKOFF_S = 0.5
CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", 32 << 20),
    ("grpc.max_send_message_length", 32 << 20),
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # in spite of its name, the limit of one attempt to connect
    ("grpc.max_reconnect_backoff_ms", 500),
]

Stream = grpc.aio.StreamStreamCall[pb.ToWorker, pb.FromWorker]


@dataclass(frozen=True, slots=True)
class Heard:
    """A message for a request, or the loss of the worker that had it."""

    worker: WorkerClient
    message: pb.FromWorker | pb.SequenceTokens | WorkerLost


Inbox = asyncio.Queue[Heard]


class WorkerClient:
    def __init__(
        self,
        address: str,
        *,
        role: pb.WorkerRole,
        router_id: str,
        secret: bytes,
        on_change: Callable[[], None],
    ) -> None:
        """``on_change`` is called when the worker's state may let a waiting request go on."""
        self.address = address
        self.role = role
        self._router_id = router_id
        self._secret = secret
        self._on_change = on_change
        self._inboxes: dict[str, Inbox] = {}
        self._outgoing: asyncio.Queue[pb.ToWorker] = asyncio.Queue()
        self._status: pb.WorkerStatus | None = None
        self._stream: Stream | None = None
        self.problem = "not connected yet"

    @property
    def status(self) -> pb.WorkerStatus | None:
        """As last heard; None while not attached."""
        return self._status

    @property
    def incarnation(self) -> int:
        """Which process it is; 0 while not attached."""
        return self._status.identity.incarnation if self._status is not None else 0

    @property
    def is_ready(self) -> bool:
        status = self._status
        return status is not None and not status.draining and status.last_step_age_s < STUCK_LIMIT_S

    @property
    def num_requests(self) -> int:
        return len(self._inboxes)

    # -------------------------------------------------------------- requests

    def open(self, request_id: str, inbox: Inbox, message: pb.ToWorker) -> None:
        """Sends the message; what the worker says about the request goes to ``inbox``."""
        if self._status is None:
            inbox.put_nowait(Heard(self, WorkerLost(f"worker {self.address} is not connected")))
            return
        self._inboxes[request_id] = inbox
        self._outgoing.put_nowait(message)

    def close(self, request_id: str) -> None:
        """No more interest: the request is over on the worker. Idempotent."""
        if self._inboxes.pop(request_id, None) is not None:
            self._on_change()

    def release(self, request_id: str, reason: str) -> None:
        """Ends the request on the worker. Idempotent."""
        if request_id in self._inboxes:
            self.close(request_id)
            self._outgoing.put_nowait(_release(request_id, reason))

    # --------------------------------------------------------------- session

    def hang_up(self) -> None:
        """Ends the session; ``run`` makes a new one."""
        if self._stream is not None:
            self._stream.cancel()

    async def run(self) -> None:
        """Keeps a session for as long as the task lives."""
        backoff_s = MIN_BACKOFF_S
        async with grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS) as channel:
            while True:
                self.problem = await self._session_until_lost(channel)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S) if self._status is None else MIN_BACKOFF_S
                self._lost()
                await asyncio.sleep(backoff_s)

    async def _session_until_lost(self, channel: grpc.aio.Channel) -> str:
        """Why it ended."""
        try:
            await self._session(channel)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name.lower()}: {error.details()}"
        except TimeoutError:
            return f"silent for {SILENCE_LIMIT_S:g} s"
        except (ProtocolViolation, asyncio.InvalidStateError) as error:
            return str(error)
        return "the session was closed"

    async def _session(self, channel: grpc.aio.Channel) -> None:
        stream = self._stream = pb_grpc.WorkerStub(channel).Session()
        try:
            async with asyncio.timeout(ATTACH_LIMIT_S):
                await self._attach(stream)
            await self._until_one_ends(self._receive(stream), self._send(stream), self._beat())
        finally:
            stream.cancel()

    @staticmethod
    async def _until_one_ends(*work: Coroutine[Any, Any, None]) -> None:
        """Raises what it raised. Not a TaskGroup: an error beside a cancellation would swallow that."""
        tasks = [asyncio.create_task(coroutine) for coroutine in work]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            if not task.cancelled():  # as after hang_up
                task.result()

    async def _attach(self, stream: Stream) -> None:
        first = await stream.read()
        if not isinstance(first, pb.FromWorker) or not first.HasField("challenge"):
            raise ProtocolViolation("the worker did not open with a challenge")
        challenge = first.challenge
        if challenge.identity.role != self.role:
            wanted = pb.WorkerRole.Name(self.role)
            raise ProtocolViolation(
                f"{self.address} is {pb.WorkerRole.Name(challenge.identity.role)}, not {wanted}"
            )
        proof = auth.session_proof(self._secret, nonce=challenge.nonce, router_id=self._router_id)
        attach = pb.Attach(protocol_version=auth.PROTOCOL_VERSION, router_id=self._router_id, proof=proof)
        await stream.write(pb.ToWorker(attach=attach))

    async def _receive(self, stream: Stream) -> None:
        while True:
            async with asyncio.timeout(SILENCE_LIMIT_S):
                message = await stream.read()
            if not isinstance(message, pb.FromWorker):  # EOF
                return
            self._dispatch(message)

    async def _send(self, stream: Stream) -> None:
        while True:
            message = await self._outgoing.get()
            async with asyncio.timeout(SILENCE_LIMIT_S):
                await stream.write(message)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_PERIOD_S)
            self._outgoing.put_nowait(pb.ToWorker(heartbeat=pb.Heartbeat()))

    def _dispatch(self, message: pb.FromWorker) -> None:
        match message.WhichOneof("message"):
            case "status":
                self._reported(message.status)
            case "tokens":
                for sequence in message.tokens.sequences:
                    self._deliver(sequence.request_id, sequence)
            case "reserved":
                self._deliver(message.reserved.request_id, message)
            case "refused":
                self._deliver(message.refused.request_id, message)
            case "handoff":
                self._deliver(message.handoff.request_id, message)
            case "failed":
                self._deliver(message.failed.request_id, message)
            case kind:
                raise ProtocolViolation(f"a worker sent {kind}")

    def _deliver(self, request_id: str, message: pb.FromWorker | pb.SequenceTokens) -> None:
        if inbox := self._inboxes.get(request_id):
            inbox.put_nowait(Heard(self, message))

    def _reported(self, status: pb.WorkerStatus) -> None:
        if self._status is None:
            logger.info("worker_attached address=%s", self.address)
        self._status = status
        if status.last_step_age_s >= STUCK_LIMIT_S and self._inboxes:
            self._give_up(f"its engine has stood still for {status.last_step_age_s:.0f} s")
        self._on_change()

    def _lost(self) -> None:
        if self._status is not None:
            logger.warning("worker_lost address=%s reason=%s", self.address, self.problem)
        self._status = None
        self._give_up(self.problem)
        self._outgoing = asyncio.Queue()  # what was to be said dies with the session
        self._on_change()

    def _give_up(self, reason: str) -> None:
        """Tells every request of this worker."""
        inboxes, self._inboxes = self._inboxes, {}
        for request_id, inbox in inboxes.items():
            inbox.put_nowait(Heard(self, WorkerLost(f"worker {self.address} was lost: {reason}")))
            self._outgoing.put_nowait(_release(request_id, "lost"))


def _release(request_id: str, reason: str) -> pb.ToWorker:
    return pb.ToWorker(release=pb.Release(request_id=request_id, reason=reason))
