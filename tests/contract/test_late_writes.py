"""After a drain the freed blocks belong to somebody else: nothing ever lands in them."""

import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from pdserve.transfer.stream import ByteStream
from tests.support.links import (
    BACKENDS,
    LAYOUT,
    WAIT_S,
    Decode,
    Prefill,
    landing_plan,
    open_decode,
    open_prefill,
    place_in_stream,
    push_all,
    push_plan,
)

SOURCE = (9, 3, 4)
TARGET = (5, 6, 7)
POISON = -1.0
# In the OPEN, in a DATA header, before the first payload byte, in payloads, in a later frame.
HOLD_AT = (300, 420, 460, 500, 700, 1200, 1700)
HOLD_AT_BESIDE = {
    "nccl": (14, 84, 139, 143),  # in the OPEN, in a DATA header, before a checksum, in it
    "cuda-ipc": (14, 84, 139, 143),
    "shm": (14, 84, 139, 145, 160, 173),  # before an offer, in it, in its offsets, behind the first two
}
HOLDS = [(backend, place) for backend in BACKENDS for place in HOLD_AT_BESIDE.get(backend, HOLD_AT)]


class HeldStream:
    """Stops before byte ``hold_at`` until ``go_on``: that which is late is the rest of it."""

    def __init__(self, inner: ByteStream, hold_at: int) -> None:
        self._inner = inner
        self._until_hold = hold_at
        self.is_held = threading.Event()
        self.go_on = threading.Event()

    def send_some(self, views: Sequence[memoryview], wait_s: float) -> int:
        if self.go_on.is_set():
            return self._inner.send_some(views, wait_s)
        if not self._until_hold:
            self.is_held.set()
            self.go_on.wait(min(wait_s, 1.0))
            return 0
        some = memoryview(b"".join(views)[: self._until_hold])
        sent = self._inner.send_some([some], wait_s)
        self._until_hold -= sent
        return sent

    def receive_some(self, views: Sequence[memoryview], wait_s: float) -> int:
        return self._inner.receive_some(views, wait_s)

    def close(self) -> None:
        self.go_on.set()
        self._inner.close()


def poison(decode: Decode) -> None:
    for pool in decode.kv.pools:
        pool[:] = POISON


def assert_still_poisoned(decode: Decode) -> None:
    assert all((pool == POISON).all() for pool in decode.kv.pools), "a late write landed"


def drain(decode: Decode, reservation_id: int) -> None:
    quiet = threading.Event()
    decode.table.withdraw(reservation_id, quiet.set)
    assert quiet.wait(1.0)


def push_next_request(prefill: Prefill, decode: Decode) -> None:
    """Into the same blocks. Frames on a link keep their order: all that was late has arrived before."""
    plan = landing_plan(decode, blocks=TARGET, request_id="next", reservation_id=6, fence=8)
    decode.table.expect(plan)
    push_all(prefill, push_plan(plan, decode, blocks=(20, 21, 22)))
    assert prefill.done.get(timeout=WAIT_S).sealed
    sent = prefill.kv.tokens((20, 21, 22), 0, plan.num_tokens)
    assert np.array_equal(decode.kv.tokens(TARGET, 0, plan.num_tokens), sent)


@pytest.mark.parametrize("block_size", [4, 3], ids=["placed", "staged"])
@pytest.mark.parametrize(("backend", "hold_at"), HOLDS)
def test_what_arrives_after_the_drain_lands_nowhere(backend: str, hold_at: int, block_size: int) -> None:
    held: list[HeldStream] = []

    def hold(stream: ByteStream) -> ByteStream:
        held.append(HeldStream(stream, place_in_stream(backend, hold_at)))
        return held[-1]

    layout = replace(LAYOUT, block_size=block_size)
    with (
        open_decode(backend, layout=layout) as decode,
        open_prefill(backend, decode.connect, wrap=hold) as prefill,
    ):
        plan = landing_plan(decode, blocks=TARGET if block_size == 4 else (*TARGET, 8))
        decode.table.expect(plan)
        push_all(prefill, push_plan(plan, decode, blocks=SOURCE))
        await_hold(held)
        drain(decode, plan.reservation_id)
        poison(decode)
        held[0].go_on.set()
        outcome = prefill.done.get(timeout=WAIT_S)
        assert (outcome.sealed, outcome.reason) == (False, "unknown_reservation")
        assert_still_poisoned(decode)
        assert decode.sealed.empty()
        if block_size == LAYOUT.block_size:
            push_next_request(prefill, decode)


@pytest.mark.parametrize(("backend", "hold_at"), HOLDS)
def test_source_blocks_are_read_no_more_once_the_push_has_ended(backend: str, hold_at: int) -> None:
    """What is written into them afterwards is another request's: decode must not be made to seal it."""
    held: list[HeldStream] = []

    def hold(stream: ByteStream) -> ByteStream:
        held.append(HeldStream(stream, place_in_stream(backend, hold_at)))
        return held[-1]

    with open_decode(backend) as decode, open_prefill(backend, decode.connect, wrap=hold) as prefill:
        plan = landing_plan(decode, blocks=TARGET)
        decode.table.expect(plan)
        push_all(prefill, push_plan(plan, decode, blocks=SOURCE))
        await_hold(held)
        prefill.outbox.abort("r", "deadline")
        assert prefill.done.get(timeout=WAIT_S).reason == "deadline"
        for pool in prefill.kv.pools:
            pool[list(SOURCE)] = POISON
        held[0].go_on.set()
        assert decode.aborted.get(timeout=WAIT_S)[0] == plan.reservation_id
        assert all((pool != POISON).all() for pool in decode.kv.pools), "freed source blocks were sent"
        drain(decode, plan.reservation_id)
        push_next_request(prefill, decode)


def await_hold(held: list[HeldStream]) -> None:
    """The first bytes go out on the sender's own thread."""
    for _ in range(1000):
        if held and held[0].is_held.wait(0.01):
            return
        threading.Event().wait(0.005)
    raise AssertionError("the link never reached the place")
