"""Two ends of a link for tests: an outbox over one pool, a landing table over another."""

from __future__ import annotations

import functools
import queue
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

import grpc

from bench.event_loop import event_loop_thread
from pdserve.clock import MonotonicClock
from pdserve.errors import Unauthorized
from pdserve.kvcache.layout import KVLayout, PoolOrder
from pdserve.transfer import grpc_link, inproc, shm, tcp
from pdserve.transfer.cuda_ipc import payloads as ipc_payloads
from pdserve.transfer.cuda_ipc.exports import IpcExports
from pdserve.transfer.cuda_ipc.host import own_identity
from pdserve.transfer.cuda_ipc.mappings import IpcMappings
from pdserve.transfer.frame import HEADER_BYTES, pack_json
from pdserve.transfer.hello import Hello
from pdserve.transfer.landing import LandingPlan, LandingTable
from pdserve.transfer.nccl import payloads as nccl_payloads
from pdserve.transfer.nccl.pair import NcclPairs
from pdserve.transfer.outbox import Connect, Outbox, Ways
from pdserve.transfer.payload import PayloadReceiver, PayloadSender, ReceiverOpeners
from pdserve.transfer.push import Endpoint, HandoffOutcome, PushPlan
from pdserve.transfer.sender import LinkLimits
from pdserve.transfer.stream import ByteStream
from pdserve.transfer.wire_choice import WireOption
from tests.support.fake_device import FakeDevice, FakeDeviceKV
from tests.support.fake_ipc import FakeIpcHost, FakeIpcMemory
from tests.support.fake_kv import NumpyKV
from tests.support.fake_nccl import FakeFabric, FakeNccl

TICKET = b"good ticket"
MODEL = "model"
WAIT_S = 10.0
LIMITS = LinkLimits()
# "unix": the transport shm where prefill's pool is not in shared memory.
BACKENDS = ["inproc", "tcp", "grpc", "shm", "unix", "nccl", "cuda-ipc"]
ON_THIS_HOST = {"shm", "unix"}
OVER_TCP = {"tcp", "nccl", "cuda-ipc"}
# Their payloads are not in the stream.
BESIDE_THE_STREAM = {"shm", "nccl", "cuda-ipc"}
LAYOUT = KVLayout(
    num_layers=3, num_kv_heads=2, head_dim=8, dtype="float32", block_size=4, order=PoolOrder.HEAD_MAJOR
)


def place_in_stream(backend: str, at: int) -> int:
    """``at`` counts the sender's bytes, for a backend beside the stream from its OPEN on: PAIRs differ."""
    if backend not in BESIDE_THE_STREAM:
        return at
    pairs: dict[str, dict[str, object]] = {
        "nccl": {"version": "2.30.3"},
        "cuda-ipc": {**own_identity().as_dict(), "unmapped": []},
        "shm": {},
    }
    frames = (Hello(100, "model", LAYOUT).as_dict(), {"transport": backend, **pairs[backend]})
    return at + sum(HEADER_BYTES + len(pack_json(frame)) for frame in frames)


class NcclEnd:
    """One process's NCCL: a library by script over a device that is none, reaching all others here."""

    def __init__(self, kv: NumpyKV, version: str) -> None:
        device = FakeDevice()
        self.clock = ShiftedClock()
        self.library = FakeNccl(fabric(), device, version)
        self.device_kv = FakeDeviceKV(kv, device)
        self.pairs = NcclPairs(self.library, self.device_kv, self.clock)


class IpcEnd:
    """One process's side of CUDA IPC: over a device that is none, and neighbour to all others here."""

    def __init__(self, kv: NumpyKV) -> None:
        self.clock = ShiftedClock()
        self.device = FakeDevice()
        self.device_kv = FakeDeviceKV(kv, self.device)
        self.memory = FakeIpcMemory(ipc_host())
        self.identity = own_identity()
        self.exports = IpcExports(self.memory)
        self.mappings = IpcMappings(self.memory, self.device_kv, self.clock)

    def open_sender(self, stream: ByteStream, limit_s: float) -> PayloadSender:
        return ipc_payloads.open_sender(self.mappings, self.identity, self.clock, stream, limit_s)

    def open_receiver(self, stream: ByteStream, request: dict[str, object]) -> PayloadReceiver:
        decode = ipc_payloads.IpcDecode(self.exports, self.device_kv, self.identity, self.clock)
        return decode.open_receiver(stream, request)


@functools.cache
def ipc_host() -> FakeIpcHost:
    return FakeIpcHost()


@functools.cache
def fabric() -> FakeFabric:
    return FakeFabric()


class ShiftedClock:
    """Real time and what a test adds to it."""

    def __init__(self) -> None:
        self._clock = MonotonicClock()
        self.shift_s = 0.0

    def now_s(self) -> float:
        return self._clock.now_s() + self.shift_s


@dataclass
class Decode:
    kv: NumpyKV
    table: LandingTable
    endpoint: Endpoint
    connect: Connect
    incarnation: int
    sealed: queue.Queue[tuple[int, int]]
    aborted: queue.Queue[tuple[int, str]]
    nccl: NcclEnd
    ipc: IpcEnd


@dataclass
class Prefill:
    kv: NumpyKV
    outbox: Outbox
    nccl: NcclEnd
    ipc: IpcEnd
    done: queue.Queue[HandoffOutcome] = field(default_factory=queue.Queue)


def verify(ticket: bytes, plan: LandingPlan) -> None:
    if ticket != TICKET:
        raise Unauthorized(f"bad ticket for {plan.request_id}")


@contextmanager
def open_decode(
    backend: str,
    *,
    layout: KVLayout = LAYOUT,
    fingerprint: str = MODEL,
    incarnation: int = 1,
    port: int = 0,
    nccl_version: str = "2.30.3",
) -> Iterator[Decode]:
    kv = NumpyKV(layout, num_blocks=64)
    nccl, ipc = NcclEnd(kv, nccl_version), IpcEnd(kv)
    sealed: queue.Queue[tuple[int, int]] = queue.Queue()
    aborted: queue.Queue[tuple[int, str]] = queue.Queue()
    table = LandingTable(
        hello=Hello(incarnation, fingerprint, layout),
        kv=kv,
        verify_ticket=verify,
        on_sealed=lambda reservation_id, token: sealed.put((reservation_id, token)),
        on_aborted=lambda reservation_id, reason: aborted.put((reservation_id, reason)),
    )
    with ExitStack() as stack:
        openers: ReceiverOpeners = {
            "nccl": functools.partial(nccl_payloads.open_receiver, nccl.pairs, nccl.clock),
            "cuda-ipc": ipc.open_receiver,
        }
        address, connect = _listen(backend, table, port, stack, openers)
        endpoint = Endpoint(backend, address)
        yield Decode(kv, table, endpoint, connect, incarnation, sealed, aborted, nccl, ipc)


def _listen(
    backend: str, table: LandingTable, port: int, stack: ExitStack, openers: ReceiverOpeners
) -> tuple[str, Connect]:
    clock = MonotonicClock()
    if backend == "inproc":
        inproc_listener = inproc.InprocListener(table, clock=clock)
        stack.callback(inproc_listener.close)
        return "", inproc_listener.connect
    if backend in OVER_TCP:
        listener = tcp.TcpListener(
            table,
            host="127.0.0.1",
            port=port,
            clock=clock,
            payload_openers={} if backend == "tcp" else openers,
        )
        listener.start()
        stack.callback(listener.close)
        return f"127.0.0.1:{listener.port}", tcp.connect
    if backend in ON_THIS_HOST:
        shm_listener = shm.SharedMemoryListener(table, clock=clock)
        shm_listener.start()
        stack.callback(shm_listener.close)
        return shm_listener.address, _connect_with_pool
    assert backend == "grpc", backend
    thread = event_loop_thread()

    async def start() -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0), *grpc_link.OPTIONS])
        server.add_generic_rpc_handlers((grpc_link.handler(table, clock),))
        bound = server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        return server, bound

    server, bound = thread.run(start())
    stack.callback(lambda: thread.run(server.stop(0.1)))
    return f"127.0.0.1:{bound}", grpc_link.connect


def _connect_with_pool(endpoint: Endpoint, limit_s: float) -> ByteStream:
    raise AssertionError("shm connects from a pool: see open_prefill")


@contextmanager
def open_prefill(
    backend: str,
    connect: Connect,
    *,
    layout: KVLayout = LAYOUT,
    incarnation: int = 100,
    limits: LinkLimits = LIMITS,
    wrap: Callable[[ByteStream], ByteStream] = lambda stream: stream,
    nccl_version: str = "2.30.3",
    wire_option: WireOption = "same",
) -> Iterator[Prefill]:
    kv = NumpyKV(layout, num_blocks=64, is_shared=backend == "shm")
    kv.randomize(incarnation)
    nccl, ipc = NcclEnd(kv, nccl_version), IpcEnd(kv)
    shared_memory = shm.SharedMemoryWay(kv, MonotonicClock())
    if backend in ON_THIS_HOST:
        connect = shared_memory.connect
    outbox = Outbox(
        hello=Hello(incarnation, MODEL, layout),
        kv=kv,
        ways=Ways(
            {
                "tcp": tcp.connect,  # the last rung of the ladder
                backend: lambda endpoint, limit_s: wrap(connect(endpoint, limit_s)),
            },
            {
                "nccl": functools.partial(nccl_payloads.open_sender, nccl.pairs, nccl.clock),
                "cuda-ipc": ipc.open_sender,
                **shared_memory.senders,
            },
        ),
        clock=MonotonicClock(),
        limits=limits,
        wire_option=wire_option,
    )
    try:
        yield Prefill(kv, outbox, nccl, ipc)
    finally:
        outbox.close()


def landing_plan(decode: Decode, *, blocks: tuple[int, ...], **changes: object) -> LandingPlan:
    plan = LandingPlan(
        request_id="r",
        reservation_id=5,
        fence=7,
        decode_incarnation=decode.incarnation,
        num_tokens=10,
        num_cached_tokens=0,
        block_table=blocks,
    )
    return replace(plan, **changes)  # type: ignore[arg-type]


def push_plan(plan: LandingPlan, decode: Decode, *, blocks: tuple[int, ...], **changes: object) -> PushPlan:
    push = PushPlan(
        request_id=plan.request_id,
        reservation_id=plan.reservation_id,
        fence=plan.fence,
        decode_incarnation=plan.decode_incarnation,
        ticket=TICKET,
        endpoints=(decode.endpoint,),
        block_table=blocks,
        num_tokens=plan.num_tokens,
        num_cached_tokens=plan.num_cached_tokens,
    )
    return replace(push, **changes)  # type: ignore[arg-type]


def push_all(prefill: Prefill, plan: PushPlan, *, chunk: int = 3, token: int = 42) -> None:
    """As the engine does it: layer by layer, chunk by chunk, then the commit."""
    prefill.outbox.open(plan, prefill.done.put)
    for end in [*range(chunk, plan.num_tokens, chunk), plan.num_tokens]:
        for layer in range(prefill.kv.layout.num_layers):
            prefill.outbox.layer_written(plan.request_id, layer, end)
    prefill.outbox.commit(plan.request_id, token)
