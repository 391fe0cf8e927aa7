"""Decode copies out of prefill's own pool: what it may believe when the blocks were let go meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from pdserve.errors import ProtocolViolation
from pdserve.kvcache.pieces import Pieces
from pdserve.kvcache.segment import Segment, WireOrder
from pdserve.kvcache.shared_memory import SharedMemory
from pdserve.transfer.holds import NUM_SLOTS, Holds, PeerHolds
from tests.support.fake_kv import NumpyKV, NumpyLanding
from tests.support.links import (
    LAYOUT,
    WAIT_S,
    Decode,
    Prefill,
    landing_plan,
    open_decode,
    open_prefill,
    push_all,
    push_plan,
)

SOURCE = (9, 3, 4)
TARGET = (5, 6, 7)
POISON = -1.0


@dataclass
class Stop:
    """Where decode's thread stands still: before its first look, or after its last byte."""

    where: str
    is_there: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)

    def here(self, where: str) -> None:
        if where == self.where and not self.is_there.is_set():
            self.is_there.set()
            assert self.go_on.wait(WAIT_S)


class StoppingPieces(Pieces):
    stop: Stop

    def copy_from(self, memory: SharedMemory, offsets: bytes, may_go_on: Callable[[], bool]) -> int | None:
        self.stop.here("before")
        checksum = super().copy_from(memory, offsets, may_go_on)
        self.stop.here("after")
        return checksum


def stop_in_copies(kv: NumpyKV, stop: Stop, monkeypatch: pytest.MonkeyPatch) -> None:
    incoming = kv.incoming

    def stopping(segment: Segment, block_table: Sequence[int], wire_order: WireOrder) -> NumpyLanding:
        landing = incoming(segment, block_table, wire_order)
        landing.payload.__class__ = StoppingPieces
        landing.payload.stop = stop  # type: ignore[attr-defined]
        return landing

    monkeypatch.setattr(kv, "incoming", stopping)


@contextmanager
def stopped(where: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Decode, Prefill, Stop]]:
    """A push whose first payload decode is just copying."""
    stop = Stop(where)
    with open_decode("shm") as decode, open_prefill("shm", decode.connect) as prefill:
        stop_in_copies(decode.kv, stop, monkeypatch)
        plan = landing_plan(decode, blocks=TARGET)
        decode.table.expect(plan)
        prefill.outbox.open(push_plan(plan, decode, blocks=SOURCE), prefill.done.put)
        prefill.outbox.commit("r", 42)
        try:
            assert stop.is_there.wait(WAIT_S)
            yield decode, prefill, stop
        finally:
            stop.go_on.set()


def reuse(prefill: Prefill) -> None:
    for pool in prefill.kv.pools:
        pool[list(SOURCE)] = POISON


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_copy_that_outlived_its_push_is_not_believed(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with stopped(where, monkeypatch) as (decode, prefill, stop):
        prefill.outbox.abort("r", "deadline")
        assert prefill.done.get(timeout=1.0).reason == "deadline", "prefill waits for a stopped decode"
        reuse(prefill)
        stop.go_on.set()
        assert decode.aborted.get(timeout=WAIT_S)[0] == 5
        assert decode.sealed.empty()
        assert decode.table.num_bytes == 0
        push_next_request(prefill, decode)


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_copy_that_outlived_its_link_is_not_believed(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with stopped(where, monkeypatch) as (decode, prefill, stop):
        prefill.outbox.close()
        assert not prefill.done.get(timeout=1.0).sealed
        reuse(prefill)
        stop.go_on.set()
        assert decode.aborted.get(timeout=WAIT_S)[0] == 5
        assert decode.sealed.empty()
        assert decode.table.num_bytes == 0


def test_blocks_become_quiet_only_when_the_copy_into_them_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with stopped("before", monkeypatch) as (decode, prefill, stop):
        quiet = threading.Event()
        decode.table.withdraw(5, quiet.set)
        assert not quiet.wait(0.1), "its thread may still write"
        stop.go_on.set()
        assert quiet.wait(1.0)
        assert not any(pool.any() for pool in decode.kv.pools), "withdrawn before the first byte"
        assert prefill.done.get(timeout=WAIT_S).reason == "unknown_reservation"


def test_a_checksum_over_other_bytes_than_were_copied_aborts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pieces, "checksum", lambda self: 12345)
    with open_decode("shm") as decode, open_prefill("shm", decode.connect) as prefill:
        plan = landing_plan(decode, blocks=TARGET)
        decode.table.expect(plan)
        push_all(prefill, push_plan(plan, decode, blocks=SOURCE))
        assert not prefill.done.get(timeout=WAIT_S).sealed
        assert decode.aborted.get(timeout=WAIT_S) == (5, "checksum")
        assert decode.sealed.empty()


def push_next_request(prefill: Prefill, decode: Decode) -> None:
    plan = landing_plan(decode, blocks=TARGET, request_id="next", reservation_id=6, fence=8)
    decode.table.expect(plan)
    push_all(prefill, push_plan(plan, decode, blocks=(20, 21, 22)))
    assert prefill.done.get(timeout=WAIT_S).sealed
    sent = prefill.kv.tokens((20, 21, 22), 0, plan.num_tokens)
    assert np.array_equal(decode.kv.tokens(TARGET, 0, plan.num_tokens), sent)


def test_when_every_slot_is_taken_the_payload_is_in_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Holds, "take", lambda self: None)
    with open_decode("shm") as decode, open_prefill("shm", decode.connect) as prefill:
        push_next_request(prefill, decode)


def test_a_slot_is_free_again_after_its_push_and_its_number_never_comes_back() -> None:
    holds = Holds()
    peer = PeerHolds(SharedMemory.of_peer(holds.memory.open_for_peer()))
    taken = [holds.take() for _ in range(NUM_SLOTS)]
    assert holds.take() is None
    first = taken[0]
    assert first is not None
    assert peer.is_held(*first)
    holds.let_go(first[0])
    assert not peer.is_held(*first)
    again = holds.take()
    assert again is not None
    assert again[0] == first[0]
    assert peer.is_held(*again)
    assert not peer.is_held(*first)
    with pytest.raises(ProtocolViolation, match="no slot"):
        peer.is_held(NUM_SLOTS, 1)


def test_a_peer_cannot_write_and_the_owner_cannot_shrink() -> None:
    memory = SharedMemory.create(4096)
    fd = memory.open_for_peer()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(fd, b"x")
    theirs = SharedMemory.of_peer(fd)
    with pytest.raises(TypeError, match="readonly"):
        theirs.content[0] = 1
    memory.content[0] = 7
    assert theirs.content[0] == 7
    with pytest.raises(PermissionError):
        os.truncate(f"/proc/self/fd/{fd}", 0)


def test_a_file_that_may_shrink_is_not_mapped() -> None:
    fd = os.memfd_create("unsealed")
    os.ftruncate(fd, 4096)
    with pytest.raises(ProtocolViolation, match="sealed"):
        SharedMemory.of_peer(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.parametrize(
    ("offsets", "problem"),
    [
        ([0, 4096 - 255], "outside"),
        ([0, 2**64 - 64], "outside"),
        ([0], "1 pieces for 2"),
        ([], "0 pieces for 2"),
        ([0, 0, 0], "3 pieces for 2"),
        (list(range(16)), "pieces of 32 bytes"),
    ],
)
def test_only_pieces_that_fit_are_copied(offsets: list[int], problem: str) -> None:
    kv = NumpyKV(LAYOUT, num_blocks=4)
    target = kv.incoming(Segment(0, 1, 0, 2, 0, 4), (1,), WireOrder.BLOCK).payload
    memory = SharedMemory.create(4096)
    with pytest.raises(ProtocolViolation, match=problem):
        target.copy_from(memory, np.array(offsets, np.uint64).tobytes(), lambda: True)
    assert not any(pool.any() for pool in kv.pools)


def test_blocks_are_copied_into_one_run_of_memory() -> None:
    """As for a pool on a GPU, whose payloads land in the host's memory first."""
    kv = NumpyKV(LAYOUT, num_blocks=4, is_shared=True)
    kv.randomize(1)
    source = kv.outgoing(Segment(0, 3, 0, 2, 0, 8), (3, 1), WireOrder.BLOCK)
    landed = SharedMemory.create(source.num_bytes)
    target = Pieces.of_arrays([np.frombuffer(landed.content, np.uint8)])
    offsets = source.shared_offsets()
    assert kv.shared_memory is not None
    assert offsets is not None
    assert target.copy_from(kv.shared_memory, offsets, lambda: True) == source.checksum()
    expected = bytearray(source.num_bytes)
    source.gather(0, memoryview(expected))
    assert landed.content[:] == expected
