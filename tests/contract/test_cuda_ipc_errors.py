"""CUDA IPC: memory that a peer has mapped is not given away before the peer cannot write to it."""

import queue
import subprocess
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from pdserve.errors import ProtocolViolation
from pdserve.transfer.cuda_ipc.exports import MAX_EXPORTS, Export, IpcExports
from pdserve.transfer.cuda_ipc.host import own_identity
from pdserve.transfer.cuda_ipc.payloads import IpcPayloadSender
from pdserve.transfer.device import memory
from pdserve.transfer.device.pairing import PairRefused
from pdserve.transfer.frame import FrameKind, Header
from pdserve.transfer.push import HandoffOutcome
from pdserve.transfer.sender import LinkLimits
from pdserve.transfer.stream import ByteStream
from tests.contract.test_transfer import FaultyStream
from tests.support.fake_ipc import FakeIpcHost, FakeIpcMemory
from tests.support.fleet import SOURCE, TARGET, Fleet, wait_for
from tests.support.links import LAYOUT, WAIT_S, landing_plan, open_decode, open_prefill, push_all, push_plan

NO_PROGRESS_S = 6.0


@pytest.fixture
def links() -> list[FaultyStream]:
    """Of the prefill process, in order; to be cut."""
    return []


@pytest.fixture
def fleet(links: list[FaultyStream]) -> Iterator[Fleet]:
    def wrap(stream: ByteStream) -> ByteStream:
        links.append(FaultyStream(stream))
        return links[-1]

    limits = LinkLimits(link_s=0.5)
    with (
        open_decode("cuda-ipc") as decode,
        open_prefill("cuda-ipc", decode.connect, wrap=wrap, limits=limits) as prefill,
    ):
        yield Fleet(decode, prefill)
    wait_for(lambda: not prefill.ipc.memory.num_mapped, "memory is left mapped")
    assert not decode.ipc.memory.problems


def push_by_ipc_alone(fleet: Fleet, number: int) -> HandoffOutcome:
    """There is no other way, so that it is tried although it was demoted."""
    decode = fleet.decode
    plan = landing_plan(decode, blocks=TARGET, request_id=f"r{number}", reservation_id=number, fence=number)
    decode.table.expect(plan)
    push_all(fleet.prefill, push_plan(plan, decode, blocks=SOURCE))
    return fleet.outcome()


@pytest.mark.parametrize(
    "elsewhere",
    [{"boot_id": "another"}, {"pid_namespace": 1}, {"pid": 1 << 30}],
    ids=["host", "namespace", "process"],
)
def test_a_peer_that_is_not_a_neighbour_takes_the_next_way(
    fleet: Fleet, elsewhere: dict[str, object]
) -> None:
    fleet.prefill.ipc.identity = replace(own_identity(), **elsewhere)  # type: ignore[arg-type]
    outcome = fleet.push()
    assert (outcome.sealed, outcome.transport) == (True, "tcp")
    assert fleet.decode.ipc.memory.num_allocated == 0


def test_memory_that_decode_cannot_have_makes_the_next_way_be_taken(fleet: Fleet) -> None:
    fleet.decode.ipc.memory.fails = True
    assert fleet.push().transport == "tcp"


def test_memory_that_prefill_cannot_map_comes_back_with_its_next_link(fleet: Fleet) -> None:
    fleet.prefill.ipc.memory.fails = True
    assert fleet.push().transport == "tcp"
    wait_for(lambda: fleet.decode.ipc.exports.num_retired == 1, "it is not in quarantine")
    fleet.prefill.ipc.memory.fails = False
    fleet.prefill.outbox.close()
    assert push_by_ipc_alone(fleet, 7).transport == "cuda-ipc"
    assert fleet.decode.ipc.memory.num_allocated == 1, "only the new one"


def test_a_buffer_is_freed_once_the_peer_says_that_it_is_unmapped(
    fleet: Fleet, links: list[FaultyStream]
) -> None:
    assert push_by_ipc_alone(fleet, 1).sealed
    links[0].close()
    wait_for(lambda: not fleet.prefill.ipc.memory.num_mapped, "it is not unmapped")
    wait_for(lambda: fleet.decode.ipc.exports.num_retired == 1, "it is not in quarantine")
    assert fleet.decode.ipc.memory.num_allocated == 1, "nobody has said so yet"
    assert push_by_ipc_alone(fleet, 2).sealed
    assert fleet.decode.ipc.memory.num_allocated == 1
    assert fleet.decode.ipc.exports.num_retired == 0


def test_a_copy_that_hangs_keeps_the_buffer_in_quarantine_and_no_block(fleet: Fleet) -> None:
    decode, prefill = fleet.decode, fleet.prefill
    prefill.ipc.device.script.holds_copies = True
    plan = fleet.begin_push()
    wait_for(lambda: prefill.ipc.device.script.has_held, "no copy was begun")
    fleet.drain(plan, limit_s=0.25)
    fleet.poison()
    prefill.ipc.clock.shift_s += NO_PROGRESS_S
    assert not fleet.outcome().sealed
    wait_for(lambda: decode.ipc.exports.num_retired == 1, "it is not in quarantine")
    assert prefill.ipc.memory.num_mapped == 1, "unmapped under a copy"
    prefill.ipc.device.script.holds_copies = False  # the late write
    wait_for(lambda: not prefill.ipc.memory.num_mapped, "it is not unmapped")
    fleet.assert_still_poisoned()
    assert push_by_ipc_alone(fleet, 7).sealed
    assert decode.ipc.exports.num_retired == 0


def test_an_abort_frees_the_source_blocks_while_a_copy_hangs(fleet: Fleet) -> None:
    fleet.prefill.ipc.device.script.holds_copies = True
    plan = fleet.begin_push()
    wait_for(lambda: fleet.prefill.ipc.device.script.has_held, "no copy was begun")
    fleet.prefill.outbox.abort(plan.request_id, "disconnect")
    assert fleet.prefill.done.get(timeout=0.25).reason == "disconnect"
    fleet.prefill.ipc.device.script.holds_copies = False
    fleet.drain(plan)
    outcome = fleet.push()
    assert (outcome.sealed, outcome.transport) == (True, "cuda-ipc")


@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_a_wrong_byte_is_found_by_the_checksum(fleet: Fleet, who: str) -> None:
    end = fleet.prefill.ipc if who == "prefill" else fleet.decode.ipc
    end.device.script.corrupts_copies = True
    plan = fleet.begin_push()
    assert fleet.outcome().reason == "checksum"
    fleet.drain(plan)
    assert not any(pool.any() for pool in fleet.decode.kv.pools), "it was placed before it was checked"


def test_a_notice_that_nothing_was_taken_for_ends_the_link(fleet: Fleet) -> None:
    export = fleet.decode.ipc.exports.new(1 << 20, pid=own_identity().pid)
    mapping = fleet.prefill.ipc.mappings.open(export.name, export.handle, 1 << 20)
    sender = IpcPayloadSender(mapping, fleet.prefill.ipc.clock, max_bytes=1 << 20)
    with pytest.raises(ProtocolViolation, match="TAKEN"):
        sender.hear(Header(FrameKind.TAKEN))
    sender.close()


class Exports:
    """Decode's books alone."""

    def __init__(self) -> None:
        self.memory = FakeIpcMemory(FakeIpcHost())
        self.books = IpcExports(self.memory)

    def retired(self, pid: int, *, is_idle: bool = True) -> Export:
        export = self.books.new(8, pid=pid)
        self.books.retire(export, lambda: is_idle)
        return export


def test_a_buffer_is_freed_when_the_process_that_had_it_mapped_is_gone() -> None:
    exports = Exports()
    with subprocess.Popen(["sleep", "60"]) as process:
        exports.retired(process.pid)
        exports.books.sweep()
        assert exports.memory.num_allocated == 1
        process.kill()
        process.wait(WAIT_S)
    exports.books.sweep()
    assert exports.memory.num_allocated == 0


def test_a_buffer_that_we_read_from_is_not_freed() -> None:
    exports = Exports()
    export = exports.retired(own_identity().pid, is_idle=False)
    exports.books.unmapped([export.name])
    exports.books.sweep()
    assert exports.memory.num_allocated == 1


def test_names_of_buffers_that_were_never_given_away_mean_nothing() -> None:
    exports = Exports()
    exports.retired(own_identity().pid)
    exports.books.unmapped(["invented"])
    exports.books.sweep()
    assert exports.memory.num_allocated == 1


def test_the_number_of_buffers_is_bounded() -> None:
    exports = Exports()
    pid = own_identity().pid
    for _ in range(MAX_EXPORTS // 2):
        exports.retired(pid)
        exports.books.new(8, pid=pid)
    with pytest.raises(PairRefused, match="mapped"):
        exports.books.new(8, pid=pid)


def test_what_was_sealed_is_what_was_sent(fleet: Fleet) -> None:
    for number in range(1, 4):
        assert push_by_ipc_alone(fleet, number).transport == "cuda-ipc"
        sent = fleet.prefill.kv.tokens(SOURCE, 0, 10)
        assert np.array_equal(fleet.decode.kv.tokens(TARGET, 0, 10), sent)
    assert fleet.decode.ipc.memory.num_allocated == 1, "one buffer per link"


def test_a_payload_waits_until_the_one_before_it_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "STAGING_BYTES", LAYOUT.block_bytes // LAYOUT.num_layers)
    with open_decode("cuda-ipc") as decode, open_prefill("cuda-ipc", decode.connect) as prefill:
        decode.ipc.device.script.holds_copies = True
        fleet = Fleet(decode, prefill)
        fleet.begin_push()
        with pytest.raises(queue.Empty):
            prefill.done.get(timeout=0.3)
        decode.ipc.device.script.holds_copies = False
        outcome = fleet.outcome()
        assert (outcome.sealed, outcome.reason, outcome.transport) == (True, "", "cuda-ipc")
