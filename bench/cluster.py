"""A whole system in one process: real workers, sessions, links and the router's own orchestration.

Only HTTP and process borders are left out; those have tests of their own. Workers run on
their engine and link threads, everything asyncio on one loop thread.
"""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass, field

import grpc
from transformers import PreTrainedModel

from bench.event_loop import event_loop_thread
from pdserve.clock import MonotonicClock
from pdserve.engine.build import BuiltEngine, assemble
from pdserve.engine.config import EngineConfig
from pdserve.engine.engine import EngineStats
from pdserve.model.vet import vet_model
from pdserve.rpc.session import SessionServer
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.rpc.v1 import worker_pb2_grpc as pb_grpc
from pdserve.sampling import SamplingParams
from pdserve.timeline import Timeline
from pdserve.tracing import NoTracer, Tracer
from pdserve.transfer import grpc_link, shm, tcp
from pdserve.transfer.outbox import Connect, Ways
from pdserve.transfer.stream import ByteStream
from pdserve.worker import program
from pdserve.worker.directory import RequestDirectory
from pdserve.worker.status import worker_identity
from pdserve_decode.service import DecodeService
from pdserve_prefill.service import PrefillService
from pdserve_router.admission import Admission
from pdserve_router.generation import Generation, Progress, SequenceRequest
from pdserve_router.workers import Workers

SECRET = b"cluster secret"
LEASE_S = 5.0
BLOCKS_BACK_LIMIT_S = 0.25


@dataclass
class Worker:
    """A running worker; ``gate`` closed stops its engine at the next layer boundary."""

    built: BuiltEngine
    service: DecodeService | PrefillService
    address: str
    gate: threading.Event = field(default_factory=threading.Event)

    @property
    def stats(self) -> EngineStats:
        return self.service.engine_loop.stats

    def is_empty(self) -> bool:
        stats = self.stats
        return (
            stats.num_free_blocks == stats.num_usable_blocks
            and stats.num_running == stats.num_waiting == stats.num_held == stats.num_kept == 0
        )

    def check_integrity(self) -> None:
        self.service.engine_loop.call(self.built.engine.check_integrity).result(5.0)


class Cluster:
    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self.thread = event_loop_thread()
        self.prefill: list[Worker] = []
        self.decode: list[Worker] = []
        self.wrap_stream: Callable[[ByteStream], ByteStream] = lambda stream: stream
        self.generation: Generation
        self.workers: Workers
        self.broken = threading.Event()
        self._num_requests = 0
        self._started: list[Running] = []

    @property
    def all_workers(self) -> list[Worker]:
        return [*self.prefill, *self.decode]

    def request(
        self, prompt: list[int], sampling: SamplingParams, *, traceparent: str = ""
    ) -> SequenceRequest:
        self._num_requests += 1
        timeline = Timeline(time.monotonic())
        return SequenceRequest(f"r{self._num_requests}", prompt, sampling, timeline, traceparent)

    def generate(self, prompt: list[int], sampling: SamplingParams, *, traceparent: str = "") -> list[int]:
        return self.generate_all([prompt], sampling, traceparent=traceparent)[0]

    def generate_all(
        self, prompts: list[list[int]], sampling: SamplingParams, *, traceparent: str = ""
    ) -> list[list[int]]:
        """At the same time."""

        async def one(request: SequenceRequest) -> list[int]:
            progress = Progress()
            async for _ in self.generation.tokens(request, progress):
                pass
            return progress.output_token_ids

        async def all_of_them() -> list[list[int]]:
            requests = [self.request(prompt, sampling, traceparent=traceparent) for prompt in prompts]
            return await asyncio.gather(*map(one, requests))

        return self.thread.run(asyncio.wait_for(all_of_them(), 60.0), 61.0)

    def start(self, prompt: list[int], sampling: SamplingParams) -> Running:
        running = Running(self.request(prompt, sampling), Progress())
        running.task = self.thread.submit(self._run(running))
        self._started.append(running)
        return running

    def expire(self, running: Running) -> None:
        """As when its time limit is reached."""
        now_s = self.thread.loop.time()
        self.thread.loop.call_soon_threadsafe(running.deadline.reschedule, now_s)

    def cancel_all(self) -> None:
        for running in self._started:
            running.cancel()

    async def _run(self, running: Running) -> None:
        async with (
            running.deadline,
            aclosing(self.generation.tokens(running.request, running.progress)) as stream,
        ):
            async for _ in stream:
                pass

    def assert_blocks_come_back(self, limit_s: float = BLOCKS_BACK_LIMIT_S) -> None:
        """The leak check: everything free within the promise, and every block in one place."""
        deadline_s = time.monotonic() + limit_s
        while not all(worker.is_empty() for worker in self.all_workers):
            assert time.monotonic() < deadline_s, [worker.stats for worker in self.all_workers]
            threading.Event().wait(0.005)
        for worker in self.all_workers:
            worker.check_integrity()
        assert not self.broken.is_set()


@dataclass
class Running:
    """A request under way on the loop thread."""

    request: SequenceRequest
    progress: Progress
    deadline: asyncio.Timeout = field(default_factory=lambda: asyncio.Timeout(None))
    task: object = None

    def cancel(self) -> None:
        self.task.cancel()  # type: ignore[attr-defined]


@contextmanager
def open_cluster(
    model: PreTrainedModel,
    *,
    num_prefill: int = 1,
    num_decode: int = 1,
    transport: str = "tcp",
    decode_block_size: int | None = None,
    decode_num_blocks: int | None = None,
    queue_limit_s: float = 30.0,
    tracer: Tracer | None = None,
    **config: object,
) -> Iterator[Cluster]:
    settings = {"num_blocks": 96, "block_size": 8, "max_num_batched_tokens": 64} | config
    decode_settings = settings | {
        "block_size": decode_block_size or settings["block_size"],
        "num_blocks": decode_num_blocks or settings["num_blocks"],
    }
    with ExitStack() as stack:
        cluster = Cluster(tracer or NoTracer())
        for _ in range(num_prefill):
            cluster.prefill.append(_start_prefill(cluster, model, settings, stack))
        for _ in range(num_decode):
            cluster.decode.append(_start_decode(cluster, model, decode_settings, transport, stack))
        cluster.thread.run(_start_router(cluster, queue_limit_s, stack))
        yield cluster


def _build(model: PreTrainedModel, settings: dict[str, object]) -> BuiltEngine:
    return assemble(vet_model(copy.deepcopy(model)), EngineConfig(**settings))  # type: ignore[arg-type]


def _start_prefill(
    cluster: Cluster, model: PreTrainedModel, settings: dict[str, object], stack: ExitStack
) -> Worker:
    built = _build(model, settings)
    identity = worker_identity(
        built, role=pb.WORKER_ROLE_PREFILL, incarnation=200 + len(cluster.prefill), model_name="tiny"
    )

    shared_memory = shm.SharedMemoryWay(built.storage, MonotonicClock())

    def wrapped(connect: Connect) -> Connect:
        return lambda endpoint, limit_s: cluster.wrap_stream(connect(endpoint, limit_s))

    service = PrefillService(
        built,
        identity,
        ways=Ways(
            {
                shm.NAME: wrapped(shared_memory.connect),
                tcp.NAME: wrapped(tcp.connect),
                grpc_link.NAME: wrapped(grpc_link.connect),
            },
            shared_memory.senders,
        ),
        directory=RequestDirectory(max_num_requests=64, role="prefill", tracer=cluster.tracer),
        event_loop=cluster.thread.loop,
        on_broken=cluster.broken.set,
        clock=MonotonicClock(),
    )
    stack.callback(service.outbox.close)
    return _serve(cluster, built, service, lambda server, port: None, stack)


def _start_decode(
    cluster: Cluster, model: PreTrainedModel, settings: dict[str, object], transport: str, stack: ExitStack
) -> Worker:
    built = _build(model, settings)
    identity = worker_identity(
        built, role=pb.WORKER_ROLE_DECODE, incarnation=100 + len(cluster.decode), model_name="tiny"
    )
    service = DecodeService(
        built,
        identity,
        secret=SECRET,
        lease_s=LEASE_S,
        directory=RequestDirectory(max_num_requests=64, role="decode", tracer=cluster.tracer),
        event_loop=cluster.thread.loop,
        on_broken=cluster.broken.set,
        clock=MonotonicClock(),
    )
    listener = tcp.TcpListener(service.landing, host="127.0.0.1", port=0, clock=MonotonicClock())
    listener.start()
    stack.callback(listener.close)
    shm_listener = shm.SharedMemoryListener(service.landing, clock=MonotonicClock())
    shm_listener.start()
    stack.callback(shm_listener.close)

    def accept_kv(server: grpc.aio.Server, port: int) -> None:
        server.add_generic_rpc_handlers((grpc_link.handler(service.landing, MonotonicClock()),))
        addresses = {
            shm.NAME: shm_listener.address,
            tcp.NAME: f"127.0.0.1:{listener.port}",
            grpc_link.NAME: f"127.0.0.1:{port}",
        }
        service.offer([pb.Endpoint(transport=transport, address=addresses[transport])])

    return _serve(cluster, built, service, accept_kv, stack)


def _serve(
    cluster: Cluster,
    built: BuiltEngine,
    service: DecodeService | PrefillService,
    accept_kv: Callable[[grpc.aio.Server, int], None],
    stack: ExitStack,
) -> Worker:
    async def start() -> tuple[grpc.aio.Server, int]:
        server = program.new_server()
        pb_grpc.add_WorkerServicer_to_server(SessionServer(service, secret=SECRET, lease_s=LEASE_S), server)
        port = program.bind(server, "127.0.0.1", 0)
        accept_kv(server, port)
        await server.start()
        return server, port

    server, port = cluster.thread.run(start())
    worker = Worker(built, service, f"127.0.0.1:{port}")
    worker.gate.set()
    run_commands = built.engine.on_boundary

    def boundary() -> None:
        worker.gate.wait(30.0)
        run_commands()

    built.engine.on_boundary = boundary
    service.engine_loop.start()
    stack.callback(lambda: service.engine_loop.stop(limit_s=5.0))
    stack.callback(worker.gate.set)
    stack.callback(lambda: cluster.thread.run(server.stop(0.1)))
    return worker


async def _start_router(cluster: Cluster, queue_limit_s: float, stack: ExitStack) -> None:
    cluster.workers = Workers(
        prefill=[worker.address for worker in cluster.prefill],
        decode=[worker.address for worker in cluster.decode],
        secret=SECRET,
    )
    cluster.generation = Generation(
        cluster.workers,
        Admission(max_queue=64),
        clock=MonotonicClock(),
        tracer=cluster.tracer,
        queue_limit_s=queue_limit_s,
    )
    sessions = asyncio.create_task(cluster.workers.run())

    async def stop() -> None:
        sessions.cancel()
        await asyncio.gather(sessions, return_exceptions=True)

    stack.callback(lambda: cluster.thread.run(stop()))
    stack.callback(cluster.cancel_all)
    async with asyncio.timeout(10.0):
        while cluster.workers.problems():
            await cluster.workers.wait_for_change(1.0)
