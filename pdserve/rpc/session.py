"""The worker's end of a Session: one stream per router, with everything on it.

Life of a session::

    challenge sent → Attach proved → serving → ended (router closed, lost, or lease ran out)
                 └→ refused

A session is the lease of every request that came through it. The router's messages
(heartbeats if nothing else) renew it; when it ends, for whatever reason, the service is
told once and releases what is left. Asyncio only; decisions are the service's.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import AsyncIterator
from typing import Protocol

import grpc

from pdserve.errors import PdserveError
from pdserve.rpc import auth
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.rpc.v1 import worker_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)

STATUS_PERIOD_S = 0.25
ATTACH_DEADLINE_S = 5.0
# A router that does not read is cut before its backlog costs memory that matters.
MAX_BACKLOG_MESSAGES = 20_000


class WorkerService(Protocol):
    """What a worker program does with the messages of its sessions; called on the event loop."""

    def identity(self) -> pb.WorkerIdentity: ...
    def status(self) -> pb.WorkerStatus: ...
    def handle(self, message: pb.ToWorker, session: RouterSession) -> None: ...
    def session_ended(self, session: RouterSession) -> None: ...
    async def check_integrity(self) -> None: ...


class RouterSession:
    """Messages waiting to go to one router."""

    def __init__(self, router_id: str) -> None:
        self.router_id = router_id
        self._backlog: deque[pb.FromWorker] = deque()
        self._filled = asyncio.Event()
        self._closed = False

    def send(self, message: pb.FromWorker) -> None:
        """Never blocks; drops the message once the session has ended. Event loop only."""
        if self._closed:
            return
        self._backlog.append(message)
        self._filled.set()
        if len(self._backlog) > MAX_BACKLOG_MESSAGES:
            logger.warning("session_cut router_id=%s reason=backlog", self.router_id)
            self.close()

    def close(self) -> None:
        self._closed = True
        self._filled.set()

    async def drain(self) -> AsyncIterator[pb.FromWorker]:
        while True:
            await self._filled.wait()
            self._filled.clear()
            while self._backlog and not self._closed:
                yield self._backlog.popleft()
            if self._closed:
                return


class SessionServer(pb_grpc.WorkerServicer):
    """Authenticates routers, feeds the service, and renews or ends leases."""

    def __init__(self, service: WorkerService, *, secret: bytes, lease_s: float) -> None:
        self._service = service
        self._secret = secret
        self._lease_s = lease_s
        self._sessions: set[RouterSession] = set()

    def close_sessions(self) -> None:
        for session in list(self._sessions):
            session.close()

    def push_status(self) -> None:
        """Tells every router now what it would learn at the next period."""
        status = pb.FromWorker(status=self._service.status())
        for session in self._sessions:
            session.send(status)

    async def GetStatus(
        self,
        request: pb.GetStatusRequest,
        context: grpc.aio.ServicerContext[pb.GetStatusRequest, pb.WorkerStatus],
    ) -> pb.WorkerStatus:
        if request.check_integrity:
            await self._service.check_integrity()
        return self._service.status()

    async def Session(
        self,
        request_iterator: AsyncIterator[pb.ToWorker],
        context: grpc.aio.ServicerContext[pb.ToWorker, pb.FromWorker],
    ) -> None:
        del request_iterator  # context.read() instead: it takes a deadline
        session = await self._attach(context)
        self._sessions.add(session)
        logger.info("session_opened router_id=%s", session.router_id)
        session.send(pb.FromWorker(status=self._service.status()))
        tasks = [
            asyncio.create_task(self._receive(session, context)),
            asyncio.create_task(self._send(session, context)),
            asyncio.create_task(self._report(session)),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            session.close()
            self._sessions.discard(session)
            for task in tasks:
                task.cancel()
            self._service.session_ended(session)
            results = await asyncio.gather(*tasks, return_exceptions=True)
            reasons = [repr(result) for result in results if isinstance(result, Exception)]
            logger.info("session_ended router_id=%s reasons=%s", session.router_id, reasons)

    async def _attach(
        self,
        context: grpc.aio.ServicerContext[pb.ToWorker, pb.FromWorker],
    ) -> RouterSession:
        nonce = secrets.token_bytes(auth.NONCE_BYTES)
        challenge = pb.SessionChallenge(
            protocol_version=auth.PROTOCOL_VERSION, nonce=nonce, identity=self._service.identity()
        )
        await context.write(pb.FromWorker(challenge=challenge))
        try:
            async with asyncio.timeout(ATTACH_DEADLINE_S):
                first = await context.read()
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no Attach followed the challenge")
        if _is_end(first) or not first.HasField("attach"):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the first message must be Attach")
        attach = first.attach
        if attach.protocol_version != auth.PROTOCOL_VERSION:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"protocol_version: worker {auth.PROTOCOL_VERSION}, router {attach.protocol_version}",
            )
        if not auth.is_session_proof(
            attach.proof, secret=self._secret, nonce=nonce, router_id=attach.router_id
        ):
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED, "wrong session proof: do all parts share one secret?"
            )
        return RouterSession(attach.router_id)

    async def _receive(
        self, session: RouterSession, context: grpc.aio.ServicerContext[pb.ToWorker, pb.FromWorker]
    ) -> None:
        while True:
            async with asyncio.timeout(self._lease_s):
                message = await context.read()
            if _is_end(message):
                return
            if message.HasField("heartbeat"):
                continue
            try:
                self._service.handle(message, session)
            except PdserveError as error:
                session.send(failed(_request_id(message), error))

    async def _send(
        self, session: RouterSession, context: grpc.aio.ServicerContext[pb.ToWorker, pb.FromWorker]
    ) -> None:
        async for message in session.drain():
            async with asyncio.timeout(self._lease_s):
                await context.write(message)

    async def _report(self, session: RouterSession) -> None:
        while True:
            await asyncio.sleep(STATUS_PERIOD_S)
            session.send(pb.FromWorker(status=self._service.status()))


def _is_end(message: object) -> bool:
    """The stubs do not know that ``read`` gives this when the router has closed."""
    return message is grpc.aio.EOF  # type: ignore[attr-defined]


def failed(request_id: str, error: PdserveError) -> pb.FromWorker:
    return pb.FromWorker(failed=pb.Failed(request_id=request_id, error=error.label, message=str(error)))


def _request_id(message: pb.ToWorker) -> str:
    kind = message.WhichOneof("message")
    match kind:
        case "reserve":
            return message.reserve.request_id
        case "prefill":
            return message.prefill.request_id
        case "generate":
            return message.generate.request_id
        case "release":
            return message.release.request_id
        case _:
            return ""
