"""``scripts/bench transfer``: how fast KV moves between two processes, against a plain memory copy.

The real parts: an outbox over one pool, a landing table over another in a process of its own,
layer-wise frames, blocks of 16 tokens in random order, checksums on. For every size each
transport and a memcpy of as many bytes take turns, so that all see the same machine.

    ratio_to_memcpy   memcpy's time over the transfer's, medians
    latency_us        from "all is written" to "sealed", median; small sizes only
"""

from __future__ import annotations

import asyncio
import json
import queue
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import torch

from bench.report import Labels, Report, arguments
from pdserve.clock import MonotonicClock
from pdserve.kvcache.layout import KVLayout, PoolOrder
from pdserve.kvcache.storage import KVStorage
from pdserve.transfer import grpc_link, shm, tcp
from pdserve.transfer.hello import Hello
from pdserve.transfer.landing import LandingPlan, LandingTable
from pdserve.transfer.outbox import Connect, Outbox, Ways
from pdserve.transfer.push import Endpoint, HandoffOutcome, PushPlan

BACKENDS = ("shm", "tcp", "grpc")
SIZES = [64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20]
QUICK_SIZES = [64 << 10, 16 << 20, 64 << 20]
LATENCY_LIMIT_BYTES = 1 << 20
BLOCK_SIZE, KV_HEADS, HEAD_DIM = 16, 3, 64
LAYER_TOKEN_BYTES = 2 * KV_HEADS * HEAD_DIM * 4


@dataclass(frozen=True, slots=True)
class Case:
    """A request whose KV is about ``num_bytes``, in up to 30 layers as SmolLM2 has."""

    num_bytes: int

    @property
    def layout(self) -> KVLayout:
        num_layers = max(1, min(30, self.num_bytes // (256 << 10)))
        return KVLayout(num_layers, KV_HEADS, HEAD_DIM, "float32", BLOCK_SIZE, PoolOrder.HEAD_MAJOR)

    @property
    def num_tokens(self) -> int:
        """A whole number of blocks, so that what is counted is what is moved."""
        tokens = self.num_bytes // (LAYER_TOKEN_BYTES * self.layout.num_layers)
        return max(1, round(tokens / BLOCK_SIZE)) * BLOCK_SIZE

    @property
    def moved_bytes(self) -> int:
        return self.num_tokens * self.layout.token_bytes

    @property
    def num_blocks(self) -> int:
        return self.num_tokens // BLOCK_SIZE + 1

    def block_table(self, seed: int) -> tuple[int, ...]:
        blocks = list(range(1, self.num_blocks))
        random.Random(seed).shuffle(blocks)
        return tuple(blocks)

    def plan(self, number: int) -> LandingPlan:
        return LandingPlan(f"r{number}", number, number, 1, self.num_tokens, 0, self.block_table(1))


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--receiver", metavar="CASE", help="used by the benchmark itself")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.receiver:
        asyncio.run(_receive(**json.loads(options.receiver)))
        return
    report = Report("transfer")
    for num_bytes in QUICK_SIZES if options.quick else SIZES:
        _measure(report, Case(num_bytes), seconds=1.5 if options.quick else 6.0)
    report.print_table("num_bytes", "backend")
    path = options.json or Path("bench/results/transfer.json")
    report.write(path)
    _plot(report, path.with_suffix(".png"))
    print(f"\nmedians, checksums on; rows in {path}, plot beside it")


def _measure(report: Report, case: Case, *, seconds: float) -> None:
    repeats = max(5, min(200, round(seconds / (case.moved_bytes / 1e9))))
    storage = KVStorage(case.layout, num_blocks=case.num_blocks, is_shared=True)
    times: dict[str, list[float]] = {name: [] for name in (*BACKENDS, "memcpy")}
    with _senders(case, storage, repeats + 2) as senders:
        memcpy = _memcpy(case.moved_bytes)
        for number in range(repeats + 2):
            for name, send in {**senders, "memcpy": memcpy}.items():
                times[name].append(send(number))
    median = {name: statistics.median(own[2:]) for name, own in times.items()}  # two to warm up
    for name in BACKENDS:
        labels: Labels = {"backend": name, "num_bytes": case.num_bytes, "checksum": True}
        report.add("ratio_to_memcpy", median["memcpy"] / median[name], "", **labels)
        report.add("throughput_gb_s", case.moved_bytes / median[name] / 1e9, "GB/s", **labels)
        if case.num_bytes <= LATENCY_LIMIT_BYTES:
            report.add("latency_us", median[name] * 1e6, "us", **labels)
    memcpy_labels: Labels = {"backend": "memcpy", "num_bytes": case.num_bytes}
    report.add("throughput_gb_s", case.moved_bytes / median["memcpy"] / 1e9, "GB/s", **memcpy_labels)


def _memcpy(num_bytes: int) -> Callable[[int], float]:
    source, target = (torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2))

    def copy(number: int) -> float:
        del number
        begin_s = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - begin_s

    return copy


@contextmanager
def _senders(case: Case, storage: KVStorage, count: int) -> Iterator[dict[str, Callable[[int], float]]]:
    """For each transport: push once, and how long that took until it was sealed."""
    receivers = {backend: _start_receiver(case, backend, count) for backend in BACKENDS}
    shared = shm.SharedMemoryWay(storage, MonotonicClock())
    connect: dict[str, Connect] = {"shm": shared.connect, "tcp": tcp.connect, "grpc": grpc_link.connect}
    outboxes: list[Outbox] = []
    senders: dict[str, Callable[[int], float]] = {}
    for backend, receiver in receivers.items():
        assert receiver.stdout is not None
        endpoint = Endpoint(backend, receiver.stdout.readline().strip())
        outbox = Outbox(
            hello=Hello(2, "bench", case.layout),
            kv=storage,
            ways=Ways({backend: connect[backend]}, shared.senders),
            clock=MonotonicClock(),
        )
        outboxes.append(outbox)
        senders[backend] = _sender(case, outbox, endpoint)
    try:
        yield senders
    finally:
        for outbox in outboxes:
            outbox.close()
        for receiver in receivers.values():
            receiver.terminate()
            receiver.communicate(timeout=10)


def _sender(case: Case, outbox: Outbox, endpoint: Endpoint) -> Callable[[int], float]:
    table = case.block_table(2)
    done: queue.SimpleQueue[HandoffOutcome] = queue.SimpleQueue()

    def send(number: int) -> float:
        plan = PushPlan(f"r{number}", number, number, 1, b"", (endpoint,), table, case.num_tokens, 0)
        begin_s = time.perf_counter()
        outbox.open(plan, done.put)
        outbox.commit(plan.request_id, 7)
        outcome = done.get(timeout=60)
        took_s = time.perf_counter() - begin_s
        assert outcome.sealed, outcome
        assert outcome.num_bytes == case.moved_bytes, outcome
        return took_s

    return send


def _start_receiver(case: Case, backend: str, count: int) -> subprocess.Popen[str]:
    wanted = json.dumps({"backend": backend, "num_bytes": case.num_bytes, "count": count})
    command = [sys.executable, "-m", "bench.transfer", "--receiver", wanted]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


async def _receive(backend: str, num_bytes: int, count: int) -> None:
    """The decode side: expects ``count`` pushes, prints its address, and lives until it is ended."""
    case = Case(num_bytes)
    table = LandingTable(
        hello=Hello(1, "bench", case.layout),
        kv=KVStorage(case.layout, num_blocks=case.num_blocks),
        verify_ticket=lambda ticket, plan: None,
        on_sealed=lambda reservation_id, token: None,
        on_aborted=lambda reservation_id, reason: None,
    )
    for number in range(count):
        table.expect(case.plan(number))
    address, listener = await _listen(backend, table)
    print(address, flush=True)
    await asyncio.Event().wait()
    del listener  # alive until here


async def _listen(backend: str, table: LandingTable) -> tuple[str, object]:
    clock = MonotonicClock()
    if backend == "shm":
        shm_listener = shm.SharedMemoryListener(table, clock=clock)
        shm_listener.start()
        return shm_listener.address, shm_listener
    if backend == "tcp":
        listener = tcp.TcpListener(table, host="127.0.0.1", port=0, clock=clock)
        listener.start()
        return f"127.0.0.1:{listener.port}", listener
    server = grpc.aio.server(options=grpc_link.OPTIONS)
    server.add_generic_rpc_handlers((grpc_link.handler(table, clock),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return f"127.0.0.1:{port}", server


def _plot(report: Report, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for backend in BACKENDS:
        rows = [
            row for row in report.rows if row.metric == "ratio_to_memcpy" and row.labels["backend"] == backend
        ]
        sizes = [int(row.labels["num_bytes"]) / (1 << 20) for row in rows]
        axes.plot(sizes, [row.value for row in rows], marker="o", label=backend)
    axes.set(xscale="log", xlabel="KV moved, MiB", ylabel="speed, memcpy = 1", ylim=(0, None))
    axes.set_title("KV between two processes, checksums on")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
