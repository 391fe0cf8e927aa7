"""The router's end of a session: how it attaches, what it calls lost, and that it comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from bench.event_loop import event_loop_thread
from pdserve.errors import WorkerLost
from pdserve.rpc import auth
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.rpc.v1 import worker_pb2_grpc as pb_grpc
from pdserve_router import worker_client
from pdserve_router.worker_client import Heard, WorkerClient
from tests.support.fake_fleet import eventually

SECRET = b"cluster secret"
DECODE = pb.WorkerIdentity(role=pb.WORKER_ROLE_DECODE, incarnation=1)


class Scripted(pb_grpc.WorkerServicer):
    """Says what it is told and nothing else: no status comes by itself."""

    def __init__(self, *, identity: pb.WorkerIdentity = DECODE) -> None:
        self.identity = identity
        self.heard: list[pb.ToWorker] = []
        self.proven: list[bool] = []
        self._say: asyncio.Queue[pb.FromWorker | None] = asyncio.Queue()

    def say(self, message: pb.FromWorker | None) -> None:
        """None ends the session."""
        event_loop_thread().loop.call_soon_threadsafe(self._say.put_nowait, message)

    async def Session(
        self, request_iterator: AsyncIterator[pb.ToWorker], context: Any
    ) -> AsyncIterator[pb.FromWorker]:
        nonce = b"n" * auth.NONCE_BYTES
        yield pb.FromWorker(
            challenge=pb.SessionChallenge(protocol_version=1, nonce=nonce, identity=self.identity)
        )
        attach = (await context.read()).attach
        self.proven.append(
            auth.is_session_proof(attach.proof, secret=SECRET, nonce=nonce, router_id=attach.router_id)
        )
        listening = asyncio.create_task(self._listen(context))
        try:
            while (message := await self._say.get()) is not None:
                yield message
        finally:
            listening.cancel()

    async def _listen(self, context: Any) -> None:
        while isinstance(message := await context.read(), pb.ToWorker):
            self.heard.append(message)


@contextmanager
def attached(worker: Scripted) -> Iterator[WorkerClient]:
    thread = event_loop_thread()

    async def start() -> tuple[grpc.aio.Server, WorkerClient, asyncio.Task[None]]:
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        pb_grpc.add_WorkerServicer_to_server(worker, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        client = WorkerClient(
            f"127.0.0.1:{port}",
            role=pb.WORKER_ROLE_DECODE,
            router_id="router",
            secret=SECRET,
            on_change=lambda: None,
        )
        return server, client, asyncio.create_task(client.run())

    async def stop() -> None:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.stop(None)

    server, client, running = thread.run(start())
    try:
        yield client
        assert not running.done(), "the client has given up on its worker"
    finally:
        thread.run(stop())


def status(**fields: Any) -> pb.FromWorker:
    return pb.FromWorker(status=pb.WorkerStatus(identity=DECODE, **fields))


def open_request(client: WorkerClient, request_id: str) -> asyncio.Queue[Heard]:
    async def open_it() -> asyncio.Queue[Heard]:
        inbox: asyncio.Queue[Heard] = asyncio.Queue()
        client.open(request_id, inbox, pb.ToWorker(generate=pb.Generate(request_id=request_id)))
        return inbox

    return event_loop_thread().run(open_it())


def next_of(inbox: asyncio.Queue[Heard]) -> Heard:
    return event_loop_thread().run(inbox.get())


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is judged in a fifth of a second, so that the test need not wait for three."""
    monkeypatch.setattr(worker_client, "SILENCE_LIMIT_S", 0.2)


def test_it_proves_the_secret_and_is_ready_with_the_first_status() -> None:
    worker = Scripted()
    with attached(worker) as client:
        eventually(lambda: worker.proven == [True])
        assert not client.is_ready
        worker.say(status())
        eventually(lambda: client.is_ready)


def test_a_draining_worker_is_attached_but_takes_no_requests() -> None:
    worker = Scripted()
    with attached(worker) as client:
        worker.say(status(draining=True))
        eventually(lambda: client.status is not None)
        assert not client.is_ready


def test_heartbeats_come_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_client, "HEARTBEAT_PERIOD_S", 0.02)
    worker = Scripted()
    with attached(worker):
        worker.say(status())
        eventually(lambda: sum(message.HasField("heartbeat") for message in worker.heard) >= 3)


def test_messages_go_to_the_request_they_name_and_to_no_other() -> None:
    worker = Scripted()
    with attached(worker) as client:
        worker.say(status())
        eventually(lambda: client.is_ready)
        first, second = open_request(client, "a"), open_request(client, "b")
        sequences = [pb.SequenceTokens(request_id=name, token_ids=[7]) for name in ("b", "unknown", "a")]
        worker.say(pb.FromWorker(tokens=pb.TokenBatch(sequences=sequences)))
        worker.say(pb.FromWorker(failed=pb.Failed(request_id="a", error="x")))
        heard = next_of(first).message
        assert isinstance(heard, pb.SequenceTokens)
        assert heard.request_id == "a"
        assert next_of(first).message == pb.FromWorker(failed=pb.Failed(request_id="a", error="x"))
        assert next_of(second).worker is client
        assert second.empty()


def test_a_released_request_is_released_once_and_hears_no_more() -> None:
    worker = Scripted()
    with attached(worker) as client:
        worker.say(status())
        eventually(lambda: client.is_ready)
        inbox = open_request(client, "a")
        for _ in range(2):
            event_loop_thread().loop.call_soon_threadsafe(client.release, "a", "finished")
        worker.say(pb.FromWorker(failed=pb.Failed(request_id="a")))
        open_request(client, "b")
        eventually(lambda: any(message.HasField("generate") for message in worker.heard[2:]))
        assert sum(message.HasField("release") for message in worker.heard) == 1
        assert inbox.empty()


@pytest.mark.usefixtures("quick")
def test_a_silent_worker_is_lost_and_its_requests_are_told() -> None:
    worker = Scripted()
    with attached(worker) as client:
        worker.say(status())
        eventually(lambda: client.is_ready)
        inbox = open_request(client, "a")
        assert isinstance(next_of(inbox).message, WorkerLost)
        assert "silent" in client.problem
        assert client.num_requests == 0


def test_a_session_that_ends_is_a_loss_at_once_and_is_opened_again() -> None:
    worker = Scripted()
    with attached(worker) as client:
        worker.say(status())
        eventually(lambda: client.is_ready)
        inbox = open_request(client, "a")
        worker.say(None)
        assert isinstance(next_of(inbox).message, WorkerLost)
        eventually(lambda: worker.proven == [True, True])
        worker.say(status())
        eventually(lambda: client.is_ready)


def test_a_session_that_this_end_closes_is_opened_again() -> None:
    worker = Scripted()
    with attached(worker) as client:
        worker.say(status())
        eventually(lambda: client.is_ready)
        event_loop_thread().loop.call_soon_threadsafe(client.hang_up)
        eventually(lambda: worker.proven == [True, True])


def test_a_request_for_a_worker_that_is_not_there_is_told_at_once() -> None:
    with attached(Scripted()) as client:
        assert isinstance(next_of(open_request(client, "a")).message, WorkerLost)
        assert client.num_requests == 0


def test_a_worker_of_another_role_is_refused_by_name() -> None:
    identity = pb.WorkerIdentity(role=pb.WORKER_ROLE_PREFILL)
    with attached(Scripted(identity=identity)) as client:
        eventually(lambda: "WORKER_ROLE_PREFILL" in client.problem)


def test_nonsense_from_a_worker_ends_the_session_and_nothing_else() -> None:
    worker = Scripted()
    with attached(worker) as client:
        worker.say(status())
        eventually(lambda: client.is_ready)
        worker.say(pb.FromWorker())
        eventually(lambda: worker.proven == [True, True])
