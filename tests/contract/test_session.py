"""The worker's end of a Session, over real gRPC."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
import pytest

from pdserve.errors import RequestError
from pdserve.rpc import auth
from pdserve.rpc.session import RouterSession, SessionServer
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.rpc.v1 import worker_pb2_grpc as pb_grpc
from pdserve.worker.program import bind, new_server

SECRET = b"s3cret"
LEASE_S = 0.4
STEP_LIMIT_S = 5.0


class EchoService:
    """Answers Reserve with Refused, fails Generate, and remembers what ended."""

    def __init__(self) -> None:
        self.handled: list[pb.ToWorker] = []
        self.ended = asyncio.Event()

    def identity(self) -> pb.WorkerIdentity:
        return pb.WorkerIdentity(role=pb.WORKER_ROLE_DECODE, incarnation=7)

    def status(self) -> pb.WorkerStatus:
        return pb.WorkerStatus(identity=self.identity(), num_free_blocks=3)

    def handle(self, message: pb.ToWorker, session: RouterSession) -> None:
        self.handled.append(message)
        if message.HasField("generate"):
            raise RequestError("not like this")
        session.send(pb.FromWorker(refused=pb.Refused(request_id=message.reserve.request_id)))

    def session_ended(self, session: RouterSession) -> None:
        self.ended.set()

    async def check_integrity(self) -> None:
        return None


Stream = grpc.aio.StreamStreamCall[pb.ToWorker, pb.FromWorker]


@asynccontextmanager
async def open_stream(service: EchoService) -> AsyncIterator[Stream]:
    server = new_server()
    pb_grpc.add_WorkerServicer_to_server(SessionServer(service, secret=SECRET, lease_s=LEASE_S), server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield pb_grpc.WorkerStub(channel).Session()
    finally:
        await server.stop(None)


async def read(stream: Stream) -> pb.FromWorker:
    message = await stream.read()
    assert isinstance(message, pb.FromWorker), "the session ended"
    return message


async def attach(stream: Stream, *, secret: bytes = SECRET, version: int = auth.PROTOCOL_VERSION) -> None:
    challenge = (await read(stream)).challenge
    proof = auth.session_proof(secret, nonce=challenge.nonce, router_id="router")
    await stream.write(
        pb.ToWorker(attach=pb.Attach(protocol_version=version, router_id="router", proof=proof))
    )


async def next_reply(stream: Stream) -> pb.FromWorker:
    """The next message that is not a status."""
    while True:
        message = await read(stream)
        if not message.HasField("status"):
            return message


def run(scenario: Callable[[EchoService, Stream], Awaitable[None]]) -> None:
    async def main() -> None:
        service = EchoService()
        async with asyncio.timeout(STEP_LIMIT_S), open_stream(service) as stream:
            await scenario(service, stream)

    asyncio.run(main())


def test_an_attached_router_is_told_the_status_and_is_obeyed() -> None:
    async def scenario(service: EchoService, stream: Stream) -> None:
        await attach(stream)
        assert (await read(stream)).status.num_free_blocks == 3
        await stream.write(pb.ToWorker(reserve=pb.Reserve(request_id="a")))
        assert (await next_reply(stream)).refused.request_id == "a"

    run(scenario)


@pytest.mark.parametrize(
    ("secret", "version", "code"),
    [
        (b"guess", auth.PROTOCOL_VERSION, grpc.StatusCode.UNAUTHENTICATED),
        (SECRET, auth.PROTOCOL_VERSION + 1, grpc.StatusCode.FAILED_PRECONDITION),
    ],
)
def test_a_router_without_the_secret_or_of_another_protocol_is_refused(
    secret: bytes, version: int, code: grpc.StatusCode
) -> None:
    async def scenario(service: EchoService, stream: Stream) -> None:
        await attach(stream, secret=secret, version=version)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stream.read()
        assert refusal.value.code() is code
        assert service.handled == []

    run(scenario)


def test_nothing_is_obeyed_before_the_proof() -> None:
    async def scenario(service: EchoService, stream: Stream) -> None:
        await stream.read()
        await stream.write(pb.ToWorker(reserve=pb.Reserve(request_id="a")))
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stream.read()
        assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert service.handled == []

    run(scenario)


def test_a_bad_request_fails_alone() -> None:
    async def scenario(service: EchoService, stream: Stream) -> None:
        await attach(stream)
        await stream.write(pb.ToWorker(generate=pb.Generate(request_id="bad")))
        failed = (await next_reply(stream)).failed
        assert (failed.request_id, failed.error) == ("bad", "invalid_request_error")
        await stream.write(pb.ToWorker(reserve=pb.Reserve(request_id="good")))
        assert (await next_reply(stream)).refused.request_id == "good"

    run(scenario)


def test_a_router_that_falls_silent_loses_its_lease() -> None:
    async def scenario(service: EchoService, stream: Stream) -> None:
        await attach(stream)
        await service.ended.wait()

    run(scenario)


def test_heartbeats_keep_the_lease() -> None:
    async def scenario(service: EchoService, stream: Stream) -> None:
        await attach(stream)
        for _ in range(8):
            await stream.write(pb.ToWorker(heartbeat=pb.Heartbeat()))
            await asyncio.sleep(LEASE_S / 4)
        assert not service.ended.is_set()

    run(scenario)


def test_a_router_that_hangs_up_is_noticed_at_once() -> None:
    async def scenario(service: EchoService, stream: Stream) -> None:
        await attach(stream)
        await stream.read()
        stream.cancel()
        async with asyncio.timeout(LEASE_S / 2):
            await service.ended.wait()

    run(scenario)
