"""One end of a link as a process of its own: ``python -m tests.support.link_end ROLE DEVICE BLOCK_SIZE``.

It takes commands and tells what happened, each a line of JSON. Decode begins with its address::

    decode    expect N            ─► sealed N, digest      or aborted N, reason
              withdraw N          ─► quiet N;  then its blocks are poisoned
              is_poisoned N       ─► poisoned N, answer
              landed              ─► landed, bytes
    prefill   push N, transport   ─► done N, outcome, digest of what was sent; commit false leaves it open
              abort N             ─► done N
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator

import torch
import xxhash

from pdserve.clock import MonotonicClock
from pdserve.kvcache.layout import KVLayout, PoolOrder
from pdserve.kvcache.segment import KVBytes, Segment, WireOrder
from pdserve.kvcache.storage import KVStorage
from pdserve.transfer import tcp
from pdserve.transfer.hello import Hello
from pdserve.transfer.landing import LandingPlan, LandingTable
from pdserve.transfer.outbox import Outbox, Ways
from pdserve.transfer.push import Endpoint, HandoffOutcome, PushPlan
from pdserve.worker.gpu_ways import gpu_ways

NUM_BLOCKS = 256
NUM_TOKENS = 1000
DECODE_INCARNATION, PREFILL_INCARNATION = 1, 100


class Voice:
    """Lines out, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def say(self, **content: object) -> None:
        with self._lock:
            print(json.dumps(content), flush=True)


def commands() -> Iterator[dict[str, object]]:
    for line in sys.stdin:
        yield json.loads(line)


def layout_for(device: str, block_size: int) -> KVLayout:
    """On a GPU some 32 MB in all, several payloads; on a CPU little."""
    layers, heads, dim = (8, 8, 128) if device == "cuda" else (2, 2, 16)
    return KVLayout(layers, heads, dim, "bfloat16", block_size, PoolOrder.TOKEN_MAJOR)


def block_table(layout: KVLayout) -> tuple[int, ...]:
    """Scattered, and the same for every request: each has the blocks that the one before gave up."""
    return tuple(range(NUM_BLOCKS - 1, 0, -2))[: layout.num_blocks_for(NUM_TOKENS)]


def digest(kv: KVBytes) -> str:
    """Of the KV of the block table's tokens, whatever the layout."""
    layout = kv.layout
    everything = Segment(0, layout.num_layers, 0, layout.num_kv_heads, 0, NUM_TOKENS)
    content = memoryview(bytearray(everything.payload_bytes(layout, WireOrder.TOKEN)))
    kv.outgoing(everything, block_table(layout), WireOrder.TOKEN).gather(0, content)
    return xxhash.xxh3_64_hexdigest(content)


def accept_any(ticket: bytes, plan: LandingPlan) -> None:
    """Tickets are tested elsewhere."""


def run_decode(storage: KVStorage, voice: Voice) -> None:
    clock = MonotonicClock()
    ways = gpu_ways(storage, clock)
    poisoned = {}

    def sealed(reservation_id: int, first_token_id: int) -> None:
        del first_token_id
        voice.say(event="sealed", id=reservation_id, digest=digest(ways.kv))

    def quiet(reservation_id: int) -> None:
        for pool in (*storage.k, *storage.v):
            pool.fill_(-1.0)
        poisoned[reservation_id] = digest(ways.kv)
        voice.say(event="quiet", id=reservation_id)

    table = LandingTable(
        hello=Hello(DECODE_INCARNATION, "model", storage.layout),
        kv=ways.kv,
        verify_ticket=accept_any,
        on_sealed=sealed,
        on_aborted=lambda reservation_id, reason: voice.say(
            event="aborted", id=reservation_id, reason=reason
        ),
    )
    listener = tcp.TcpListener(table, host="127.0.0.1", port=0, clock=clock, payload_openers=ways.receivers)
    listener.start()
    voice.say(event="ready", address=f"127.0.0.1:{listener.port}", ways=sorted(ways.receivers))
    for command in commands():
        number = int(str(command.get("id", 0)))
        match command["do"]:
            case "expect":
                blocks = block_table(storage.layout)
                table.expect(LandingPlan("r", number, number, DECODE_INCARNATION, NUM_TOKENS, 0, blocks))
            case "withdraw":
                table.withdraw(number, lambda number=number: quiet(number))  # type: ignore[misc]
            case "is_poisoned":
                voice.say(event="poisoned", id=number, answer=digest(ways.kv) == poisoned[number])
            case "landed":
                voice.say(event="landed", bytes=table.num_bytes)


def run_prefill(storage: KVStorage, voice: Voice) -> None:
    clock = MonotonicClock()
    ways = gpu_ways(storage, clock)
    for pool in (*storage.k, *storage.v):
        pool.normal_()
    outbox = Outbox(
        hello=Hello(PREFILL_INCARNATION, "model", storage.layout),
        kv=ways.kv,
        ways=Ways({"tcp": tcp.connect, **dict.fromkeys(ways.senders, tcp.connect)}, ways.senders),
        clock=clock,
    )

    def say_done(number: int) -> Callable[[HandoffOutcome], None]:
        return lambda outcome: voice.say(
            event="done",
            id=number,
            sealed=outcome.sealed,
            reason=outcome.reason,
            transport=outcome.transport,
            num_bytes=outcome.num_bytes,
            transfer_s=outcome.transfer_s,
            digest=digest(ways.kv),
        )

    voice.say(event="ready", ways=sorted(ways.senders))
    for command in commands():
        number = int(str(command["id"]))
        if command["do"] == "abort":
            outbox.abort(f"r{number}", "disconnected")
            continue
        plan = PushPlan(
            request_id=f"r{number}",
            reservation_id=number,
            fence=number,
            decode_incarnation=DECODE_INCARNATION,
            ticket=b"",
            endpoints=(Endpoint(str(command["transport"]), str(command["address"])),),
            block_table=block_table(storage.layout),
            num_tokens=NUM_TOKENS,
            num_cached_tokens=0,
        )
        outbox.open(plan, say_done(number))
        for layer in range(storage.layout.num_layers):
            outbox.layer_written(plan.request_id, layer, NUM_TOKENS // 2)
        if command["commit"]:
            outbox.commit(plan.request_id, 42)


def main() -> None:
    role, device, block_size = sys.argv[1:]
    torch.set_num_threads(1)
    storage = KVStorage(layout_for(device, int(block_size)), num_blocks=NUM_BLOCKS, device=device)
    {"decode": run_decode, "prefill": run_prefill}[role](storage, Voice())


if __name__ == "__main__":
    main()
