"""A session with one worker for as long as a probe takes: the doctor as a router.

What the worker says, and the end of its stream as a ``str``, goes to the given inbox.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc

from pdserve.errors import PeerError, Unauthorized
from pdserve.rpc import auth
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.rpc.v1 import worker_pb2_grpc as pb_grpc

ATTACH_LIMIT_S = 5.0
HEARTBEAT_PERIOD_S = 0.5

Stream = grpc.aio.StreamStreamCall[pb.ToWorker, pb.FromWorker]


@dataclass(frozen=True, slots=True)
class Heard:
    address: str
    message: pb.FromWorker | str


Inbox = asyncio.Queue[Heard]


class WorkerSession:
    def __init__(self, address: str, stream: Stream) -> None:
        self.address = address
        self._stream = stream
        self._writing = asyncio.Lock()

    async def send(self, message: pb.ToWorker) -> None:
        async with self._writing, asyncio.timeout(ATTACH_LIMIT_S):
            await self._stream.write(message)

    async def listen(self, inbox: Inbox) -> None:
        """Until the stream ends."""
        try:
            while isinstance(message := await self._stream.read(), pb.FromWorker):
                inbox.put_nowait(Heard(self.address, message))
            inbox.put_nowait(Heard(self.address, "the worker closed the session"))
        except grpc.aio.AioRpcError as error:
            inbox.put_nowait(Heard(self.address, f"the session broke: {error.details()}"))

    async def beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_PERIOD_S)
            await self.send(pb.ToWorker(heartbeat=pb.Heartbeat()))


@asynccontextmanager
async def open_session(address: str, *, secret: bytes, inbox: Inbox) -> AsyncIterator[WorkerSession]:
    """Raises ``Unauthorized`` for a secret that is not the worker's, ``PeerError`` for other trouble."""
    async with grpc.aio.insecure_channel(address) as channel:
        stream = pb_grpc.WorkerStub(channel).Session()
        session = WorkerSession(address, stream)
        tasks: list[asyncio.Task[None]] = []
        try:
            await _attach(stream, address, secret)
            tasks = [asyncio.create_task(session.listen(inbox)), asyncio.create_task(session.beat())]
            yield session
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            stream.cancel()


async def _attach(stream: Stream, address: str, secret: bytes) -> None:
    """Until the first status, which only a router gets that the worker believes."""
    try:
        async with asyncio.timeout(ATTACH_LIMIT_S):
            first = await stream.read()
            if not isinstance(first, pb.FromWorker):
                raise PeerError(f"{address} opened no session")
            router_id = f"doctor-{secrets.token_hex(8)}"
            proof = auth.session_proof(secret, nonce=first.challenge.nonce, router_id=router_id)
            attach = pb.Attach(protocol_version=auth.PROTOCOL_VERSION, router_id=router_id, proof=proof)
            await stream.write(pb.ToWorker(attach=attach))
            if not isinstance(await stream.read(), pb.FromWorker):
                raise PeerError(f"{address} closed the session")
    except TimeoutError:
        raise PeerError(f"{address} opened no session in {ATTACH_LIMIT_S:g} s") from None
    except grpc.aio.AioRpcError as error:
        if error.code() == grpc.StatusCode.UNAUTHENTICATED:
            raise Unauthorized(f"{address} refuses the secret") from None
        raise PeerError(f"{address}: {error.details()}") from None
