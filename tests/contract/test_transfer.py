"""What every transport promises. One suite for all of them."""

import math
import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdserve.kvcache.layout import KVLayout, PoolOrder
from pdserve.transfer.sender import LinkLimits
from pdserve.transfer.stream import ByteStream, LinkLost
from tests.support.links import (
    BACKENDS,
    BESIDE_THE_STREAM,
    LAYOUT,
    WAIT_S,
    Decode,
    landing_plan,
    open_decode,
    open_prefill,
    place_in_stream,
    push_all,
    push_plan,
)

SOURCE = (9, 3, 4, 17, 2, 30, 31, 32)
TARGET = (5, 6, 7, 21, 40, 1, 2, 3)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def assert_arrived(prefill_kv, decode: Decode, plan, push) -> None:  # type: ignore[no-untyped-def]
    begin, end = plan.num_cached_tokens, plan.num_tokens
    if begin == end:
        return
    sent = prefill_kv.tokens(push.block_table, begin, end)
    assert np.array_equal(decode.kv.tokens(plan.block_table, begin, end), sent)


@pytest.mark.parametrize("num_cached", [0, 4, 8])
@pytest.mark.parametrize("target_block_size", [4, 3])
@pytest.mark.parametrize("order", list(PoolOrder))
def test_what_was_pushed_is_what_lies_there(
    backend: str, num_cached: int, target_block_size: int, order: PoolOrder
) -> None:
    layout = replace(LAYOUT, block_size=target_block_size, order=order)
    with open_decode(backend, layout=layout) as decode, open_prefill(backend, decode.connect) as prefill:
        plan = landing_plan(decode, blocks=TARGET, num_cached_tokens=num_cached)
        push = push_plan(plan, decode, blocks=SOURCE)
        decode.table.expect(plan)
        push_all(prefill, push)
        assert decode.sealed.get(timeout=WAIT_S) == (plan.reservation_id, 42)
        outcome = prefill.done.get(timeout=WAIT_S)
        assert (outcome.sealed, outcome.reason, outcome.transport) == (True, "", backend)
        assert_arrived(prefill.kv, decode, plan, push)
        assert decode.table.num_expected == 0


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_layouts_chunks_and_lengths_arrive(data: st.DataObject) -> None:
    layout = KVLayout(
        num_layers=data.draw(st.integers(1, 4)),
        num_kv_heads=data.draw(st.integers(1, 3)),
        head_dim=data.draw(st.sampled_from([2, 4])),
        dtype="float32",
        block_size=data.draw(st.integers(1, 6)),
        order=data.draw(st.sampled_from(PoolOrder)),
    )
    theirs = replace(
        layout, block_size=data.draw(st.integers(1, 6)), order=data.draw(st.sampled_from(PoolOrder))
    )
    num_tokens = data.draw(st.integers(1, 24))
    num_cached = data.draw(st.integers(0, num_tokens // theirs.block_size)) * theirs.block_size
    with (
        open_decode("inproc", layout=theirs) as decode,
        open_prefill("inproc", decode.connect, layout=layout) as prefill,
    ):
        blocks = tuple(data.draw(st.permutations(range(1, 64)))[:24])
        plan = landing_plan(decode, blocks=blocks, num_tokens=num_tokens, num_cached_tokens=num_cached)
        push = push_plan(plan, decode, blocks=tuple(reversed(range(1, 40))))
        decode.table.expect(plan)
        push_all(prefill, push, chunk=data.draw(st.integers(1, 9)))
        assert decode.sealed.get(timeout=WAIT_S) == (plan.reservation_id, 42)
        assert_arrived(prefill.kv, decode, plan, push)


def test_only_what_decode_lacks_is_moved(backend: str) -> None:
    with open_decode(backend) as decode, open_prefill(backend, decode.connect) as prefill:
        plan = landing_plan(decode, blocks=TARGET, num_cached_tokens=8)
        decode.table.expect(plan)
        push_all(prefill, push_plan(plan, decode, blocks=SOURCE))
        outcome = prefill.done.get(timeout=WAIT_S)
        assert outcome.sealed
        assert outcome.num_bytes == LAYOUT.token_bytes * LAYOUT.block_size  # the last block travels whole


def test_a_prompt_that_decode_has_whole_is_sealed_without_a_byte(backend: str) -> None:
    with open_decode(backend) as decode, open_prefill(backend, decode.connect) as prefill:
        plan = landing_plan(decode, blocks=TARGET, num_tokens=8, num_cached_tokens=8)
        decode.table.expect(plan)
        push_all(prefill, push_plan(plan, decode, blocks=SOURCE))
        outcome = prefill.done.get(timeout=WAIT_S)
        assert (outcome.sealed, outcome.num_bytes) == (True, 0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"ticket": b"forged"}, "unauthorized: bad ticket for r"),
        ({"fence": 6}, "old_fence"),
        ({"reservation_id": 6}, "unknown_reservation"),
    ],
)
def test_a_push_without_the_right_is_refused_and_places_nothing(
    backend: str, change: dict[str, object], reason: str
) -> None:
    with open_decode(backend) as decode, open_prefill(backend, decode.connect) as prefill:
        plan = landing_plan(decode, blocks=TARGET)
        decode.table.expect(plan)
        push_all(prefill, push_plan(plan, decode, blocks=SOURCE, **change))
        outcome = prefill.done.get(timeout=WAIT_S)
        assert (outcome.sealed, outcome.reason) == (False, reason)
        assert not any(pool.any() for pool in decode.kv.pools)
        assert decode.sealed.empty()


@pytest.mark.parametrize(
    ("layout", "fingerprint", "field"),
    [
        (replace(LAYOUT, num_layers=2), "model", "num_layers"),
        (replace(LAYOUT, head_dim=16), "model", "head_dim"),
        (LAYOUT, "another model", "model_fingerprint"),
    ],
)
def test_a_peer_with_another_model_is_refused_by_the_field_that_differs(
    backend: str, layout: KVLayout, fingerprint: str, field: str
) -> None:
    with (
        open_decode(backend, layout=layout, fingerprint=fingerprint) as decode,
        open_prefill(backend, decode.connect) as prefill,
    ):
        plan = landing_plan(decode, blocks=TARGET)
        decode.table.expect(plan)
        push_all(prefill, push_plan(plan, decode, blocks=SOURCE))
        outcome = prefill.done.get(timeout=WAIT_S)
        assert not outcome.sealed
        assert outcome.reason.startswith(f"incompatible_peer: {field}")


def test_a_process_that_took_the_address_is_not_mistaken_for_the_peer(backend: str) -> None:
    with open_decode(backend, incarnation=2) as decode, open_prefill(backend, decode.connect) as prefill:
        plan = landing_plan(decode, blocks=TARGET)
        push_all(prefill, push_plan(plan, decode, blocks=SOURCE, decode_incarnation=1))
        outcome = prefill.done.get(timeout=WAIT_S)
        assert not outcome.sealed
        assert "another process" in outcome.reason


def test_after_a_restart_on_the_same_address_a_new_link_is_made() -> None:
    with ExitStack() as stack:
        first = stack.enter_context(ExitStack())
        decode = first.enter_context(open_decode("tcp", incarnation=1))
        prefill = stack.enter_context(open_prefill("tcp", decode.connect))
        port = int(decode.endpoint.address.rpartition(":")[2])
        for incarnation in (1, 2):
            if incarnation == 2:
                first.close()
                decode = stack.enter_context(open_decode("tcp", incarnation=2, port=port))
            plan = landing_plan(decode, blocks=TARGET, request_id=f"r{incarnation}")
            decode.table.expect(plan)
            push_all(prefill, push_plan(plan, decode, blocks=SOURCE))
            assert prefill.done.get(timeout=WAIT_S).sealed


def test_an_abort_by_the_sender_reaches_decode_and_ends_once(backend: str) -> None:
    with open_decode(backend) as decode, open_prefill(backend, decode.connect) as prefill:
        plan = landing_plan(decode, blocks=TARGET)
        decode.table.expect(plan)
        push = push_plan(plan, decode, blocks=SOURCE)
        prefill.outbox.open(push, prefill.done.put)
        prefill.outbox.layer_written("r", 0, 10)
        wait_until_opened(decode, plan.reservation_id)
        prefill.outbox.abort("r", "disconnect")
        prefill.outbox.abort("r", "again")
        assert decode.aborted.get(timeout=WAIT_S) == (plan.reservation_id, "disconnect")
        outcome = prefill.done.get(timeout=WAIT_S)
        assert (outcome.sealed, outcome.reason) == (False, "disconnect")
        with pytest.raises(queue.Empty):
            prefill.done.get(timeout=0.1)


def test_a_withdrawn_reservation_is_quiet_and_what_comes_later_is_dropped(backend: str) -> None:
    with open_decode(backend) as decode, open_prefill(backend, decode.connect) as prefill:
        plan = landing_plan(decode, blocks=TARGET)
        decode.table.expect(plan)
        push = push_plan(plan, decode, blocks=SOURCE)
        prefill.outbox.open(push, prefill.done.put)
        prefill.outbox.layer_written("r", 0, 10)
        wait_until_opened(decode, plan.reservation_id)
        quiet = threading.Event()
        decode.table.withdraw(plan.reservation_id, quiet.set)
        assert quiet.wait(1.0)
        for pool in decode.kv.pools:
            pool[:] = -1.0  # poison: the blocks belong to somebody else now
        prefill.outbox.commit("r", 42)
        outcome = prefill.done.get(timeout=WAIT_S)
        assert (outcome.sealed, outcome.reason) == (False, "unknown_reservation")
        assert all((pool == -1.0).all() for pool in decode.kv.pools)
        assert decode.sealed.empty()


def test_two_prefill_and_two_decode_workers_keep_apart(backend: str) -> None:
    with ExitStack() as stack:
        decodes = [stack.enter_context(open_decode(backend, incarnation=i)) for i in (1, 2)]
        by_address = {decode.endpoint.address or str(decode.incarnation): decode for decode in decodes}
        prefills = [
            stack.enter_context(open_prefill(backend, connect_by_address(by_address), incarnation=100 + i))
            for i in (1, 2)
        ]
        pushes = []
        for index in range(16):
            decode, prefill = decodes[index % 2], prefills[index // 2 % 2]
            blocks = tuple(range(1 + 3 * (index // 2), 4 + 3 * (index // 2)))
            plan = landing_plan(
                decode, blocks=blocks, request_id=f"r{index}", reservation_id=index, fence=index
            )
            decode.table.expect(plan)
            push = push_plan(plan, decode, blocks=blocks)
            if backend == "inproc":  # no addresses: the incarnation says where
                endpoint = replace(decode.endpoint, address=str(decode.incarnation))
                push = replace(push, endpoints=(endpoint,))
            push_all(prefill, push)
            pushes.append((prefill, decode, plan, push))
        for prefill in prefills:
            assert all(prefill.done.get(timeout=WAIT_S).sealed for _ in range(8))
        for prefill, decode, plan, push in pushes:
            assert_arrived(prefill.kv, decode, plan, push)


class FaultyStream:
    """Passes bytes on until ``cut_at`` have gone out; flips one bit of byte ``flip_at``."""

    def __init__(self, inner: ByteStream, *, cut_at: int = 1 << 40, flip_at: int = -1) -> None:
        self._inner = inner
        self._cut_at = cut_at
        self._flip_at = flip_at
        self._sent = 0

    def send_some(self, views: Sequence[memoryview], wait_s: float) -> int:
        if self._sent >= self._cut_at:
            self._inner.close()
            raise LinkLost("cut")
        data = bytearray(b"".join(views)[: self._cut_at - self._sent])
        if 0 <= self._flip_at - self._sent < len(data):
            data[self._flip_at - self._sent] ^= 1
        sent = self._inner.send_some([memoryview(data)], wait_s)
        self._sent += sent
        return sent

    def receive_some(self, views: Sequence[memoryview], wait_s: float) -> int:
        return self._inner.receive_some(views, wait_s)

    def close(self) -> None:
        self._inner.close()


def cuts() -> Iterator[tuple[str, int]]:
    """Interesting places: in a header, between header and payload, in a payload, near the end."""
    for backend in BACKENDS:
        if backend in BESIDE_THE_STREAM:  # with PAIR, and without the payload
            places: tuple[int, ...] = (-300, -160, -104, -66, 4, 54, 84, 139, 143, 184)
        else:
            places = (10, 64, 200, 400, 520, 600, 900, 1500, 1900, 2300, 2600)
        yield from ((backend, place) for place in places)


@pytest.mark.parametrize(("backend", "cut_at"), list(cuts()))
def test_a_cut_link_ends_the_push_on_both_sides(backend: str, cut_at: int) -> None:
    with (
        open_decode(backend) as decode,
        open_prefill(
            backend, decode.connect, wrap=partial(FaultyStream, cut_at=place_in_stream(backend, cut_at))
        ) as prefill,
    ):
        plan = landing_plan(decode, blocks=TARGET)
        decode.table.expect(plan)
        push_all(prefill, push_plan(plan, decode, blocks=SOURCE))
        outcome = prefill.done.get(timeout=WAIT_S)
        assert not outcome.sealed
        quiet = threading.Event()
        decode.table.withdraw(plan.reservation_id, quiet.set)
        assert quiet.wait(1.0)
        assert decode.sealed.empty()


def test_a_flipped_bit_anywhere_never_seals_wrong_bytes() -> None:
    """Of a short push some bytes in turn, all of its COMMIT: it ends sealed and right, or aborted."""
    layout = replace(LAYOUT, num_layers=1, num_kv_heads=1, head_dim=2)
    for position in [*range(260, 599, 7), *range(599, 690)]:
        with (
            open_decode("inproc", layout=layout) as decode,
            open_prefill(
                "inproc",
                decode.connect,
                layout=layout,
                limits=LinkLimits(reply_s=0.3),
                wrap=partial(FaultyStream, flip_at=position),
            ) as prefill,
        ):
            plan = landing_plan(decode, blocks=TARGET)
            push = push_plan(plan, decode, blocks=SOURCE)
            decode.table.expect(plan)
            push_all(prefill, push)
            if prefill.done.get(timeout=WAIT_S).sealed:
                assert_arrived(prefill.kv, decode, plan, push)
                assert decode.sealed.get(timeout=WAIT_S) == (plan.reservation_id, 42)


class DeafStream(FaultyStream):
    """A peer that is stopped: takes nothing more once ``cut_at`` bytes have gone out."""

    def send_some(self, views: Sequence[memoryview], wait_s: float) -> int:
        if self._sent >= self._cut_at:
            threading.Event().wait(wait_s)
            return 0
        return super().send_some(views, wait_s)


def stops() -> Iterator[tuple[str, int]]:
    """In a payload where there is one, in a DATA header, in a checksum (of a frame that has all)."""
    for backend in BACKENDS:
        beside = (84, 145, 200, 303) if backend == "shm" else (84, 143)
        places = beside if backend in BESIDE_THE_STREAM else (400, 700, 5011)
        yield from ((backend, place) for place in places)


@pytest.mark.parametrize(("backend", "cut_at"), list(stops()))
def test_blocks_of_a_push_to_a_stopped_peer_come_back_at_once_when_it_is_aborted(
    backend: str, cut_at: int
) -> None:
    with (
        open_decode(backend) as decode,
        open_prefill(
            backend, decode.connect, wrap=partial(DeafStream, cut_at=place_in_stream(backend, cut_at))
        ) as prefill,
    ):
        plan = landing_plan(decode, blocks=TARGET)
        decode.table.expect(plan)
        prefill.outbox.open(push_plan(plan, decode, blocks=SOURCE), prefill.done.put)
        prefill.outbox.commit("r", 42)
        with pytest.raises(queue.Empty):
            prefill.done.get(timeout=0.2)
        prefill.outbox.abort("r", "deadline")
        assert prefill.done.get(timeout=0.25).reason == "deadline"
        quiet = threading.Event()
        decode.table.withdraw(plan.reservation_id, quiet.set)
        assert quiet.wait(0.25), "decode waits for the rest of a frame that will not come"


def test_a_peer_that_never_answers_the_commit_is_given_up(backend: str) -> None:
    with (
        open_decode(backend) as decode,
        open_prefill(backend, decode.connect, limits=LinkLimits(reply_s=0.3), wrap=MuteStream) as prefill,
    ):
        plan = landing_plan(decode, blocks=TARGET)
        decode.table.expect(plan)
        push_all(prefill, push_plan(plan, decode, blocks=SOURCE))
        assert prefill.done.get(timeout=2.0).reason == "no_progress"


class MuteStream(FaultyStream):
    """Delivers what the sender waits for while the link is made, and nothing after it."""

    def receive_some(self, views: Sequence[memoryview], wait_s: float) -> int:
        if math.isinf(wait_s):
            threading.Event().wait(1.0)
            return 0
        return super().receive_some(views, wait_s)


def connect_by_address(by_address: dict[str, Decode]):  # type: ignore[no-untyped-def]
    return lambda endpoint, limit_s: by_address[endpoint.address].connect(endpoint, limit_s)


def wait_until_opened(decode: Decode, reservation_id: int) -> None:
    """Until the link's first DATA frame has been placed."""
    deadline = threading.Event()
    for _ in range(200):
        if decode.table.num_bytes:
            return
        deadline.wait(0.02)
    raise AssertionError(f"nothing arrived for reservation {reservation_id}")
