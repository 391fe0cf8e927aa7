"""NCCL reports late, hangs, and dies with its peer. None of that may cost a block or a request."""

import gc
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from pdserve.errors import ProtocolViolation
from pdserve.kvcache.segment import WireDtype
from pdserve.transfer.device import memory
from pdserve.transfer.device.pairing import PairRefused
from pdserve.transfer.frame import FrameKind, Header
from pdserve.transfer.inproc import stream_pair
from pdserve.transfer.nccl.pair import ABORT_LIMIT_S, DECODE_RANK, MAX_UNJOINED_IDS, PREFILL_RANK
from pdserve.transfer.nccl.payloads import NcclPayloadReceiver
from pdserve.transfer.push import Endpoint
from pdserve.transfer.sender import LinkLimits
from tests.support.fake_nccl import REMOTE_ERROR, SYSTEM_ERROR, Script
from tests.support.fleet import Fleet, wait_for
from tests.support.links import (
    LAYOUT,
    WAIT_S,
    NcclEnd,
    open_decode,
    open_prefill,
)

NO_PROGRESS_S = 6.0


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    limits = LinkLimits(link_s=0.5)
    with open_decode("nccl") as decode, open_prefill("nccl", decode.connect, limits=limits) as prefill:
        yield Fleet(decode, prefill)
    for end in (prefill.nccl, decode.nccl):  # the leak check
        end.library.let_abort_go.set()
        end.clock.shift_s += NO_PROGRESS_S
        wait_for(lambda end=end: not end.pairs.num_open, "a pair is left")  # type: ignore[misc]
        assert len(end.library.aborted) == len(end.library.communicators)


def test_a_healthy_pair_is_aborted_as_well_and_only_at_the_end(fleet: Fleet) -> None:
    assert [fleet.push().transport for _ in range(3)] == ["nccl"] * 3
    assert [len(end.library.communicators) for end in ends(fleet)] == [1, 1]
    assert [len(end.library.aborted) for end in ends(fleet)] == [0, 0]
    assert fleet.decode.nccl.pairs.num_unjoined_ids == 0
    # After the test the leak check finds both aborted.


def test_another_version_of_nccl_takes_the_next_way_and_costs_no_unique_id() -> None:
    with (
        open_decode("nccl", nccl_version="2.30.3") as decode,
        open_prefill("nccl", decode.connect, nccl_version="2.28.9") as prefill,
    ):
        outcome = Fleet(decode, prefill).push()
        assert (outcome.sealed, outcome.transport) == (True, "tcp")
        assert decode.nccl.library.num_ids == 0


def test_a_worker_without_nccl_refuses_the_pair_and_the_next_way_is_taken() -> None:
    with open_decode("tcp") as decode, open_prefill("nccl", decode.connect) as prefill:
        decode.endpoint = Endpoint("nccl", decode.endpoint.address)
        outcome = Fleet(decode, prefill).push()
        assert (outcome.sealed, outcome.transport) == (True, "tcp")


@pytest.mark.parametrize("who", ["prefill", "decode"])
@pytest.mark.parametrize(
    "script", [Script(init_status=SYSTEM_ERROR), Script(init_hangs=True)], ids=["fails", "hangs"]
)
def test_a_pair_that_does_not_come_up_takes_the_next_way(fleet: Fleet, who: str, script: Script) -> None:
    end = fleet.prefill.nccl if who == "prefill" else fleet.decode.nccl
    end.library.script = script
    outcome = fleet.push()
    assert (outcome.sealed, outcome.transport) == (True, "tcp")
    assert fleet.decode.nccl.pairs.num_unjoined_ids == 1


@pytest.mark.parametrize("who", ["prefill", "decode"])
@pytest.mark.parametrize("failure", [SYSTEM_ERROR, REMOTE_ERROR])
def test_an_error_reported_in_the_middle_ends_the_push_and_demotes_nccl(
    fleet: Fleet, who: str, failure: int
) -> None:
    end = fleet.prefill.nccl if who == "prefill" else fleet.decode.nccl
    end.library.script = Script(fail_from=0, failure=failure)
    plan = fleet.begin_push()
    outcome = fleet.outcome()
    assert (outcome.sealed, outcome.transport) == (False, "nccl")
    assert "nccl" in outcome.reason or "link_lost" in outcome.reason
    assert fleet.decode.aborted.get(timeout=WAIT_S)[0] == plan.reservation_id
    fleet.drain(plan)
    assert fleet.push().transport == "tcp"


@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_a_payload_without_progress_is_given_up_and_aborted(fleet: Fleet, who: str) -> None:
    end = fleet.prefill.nccl if who == "prefill" else fleet.decode.nccl
    end.library.script = Script(stall_from=0)
    plan = fleet.begin_push()
    wait_for(lambda: bool(end.library.communicators and end.library.communicators[0].num_operations), "idle")
    end.clock.shift_s += NO_PROGRESS_S
    outcome = fleet.outcome()
    assert not outcome.sealed
    for each in ends(fleet):
        wait_for(lambda each=each: len(each.library.aborted) == 1, "not aborted")  # type: ignore[misc]
    fleet.drain(plan)
    assert fleet.push().transport == "tcp"


def test_a_peer_that_is_gone_is_noticed_by_its_socket(fleet: Fleet) -> None:
    """Its GPU would only fall silent."""
    fleet.decode.nccl.library.script = Script(stall_from=0)
    plan = fleet.begin_push()
    wait_until_receiving(fleet)
    fleet.prefill.outbox.close()
    assert fleet.decode.aborted.get(timeout=1.0) == (plan.reservation_id, "link_lost")
    fleet.drain(plan)
    wait_for(lambda: len(fleet.decode.nccl.library.aborted) == 1, "not aborted")


def test_blocks_are_quiet_while_a_receive_hangs_and_what_lands_late_lands_elsewhere(fleet: Fleet) -> None:
    fleet.decode.nccl.library.script = Script(stall_from=0)
    plan = fleet.begin_push()
    wait_until_receiving(fleet)
    fleet.drain(plan, limit_s=0.25)
    fleet.poison()
    fleet.decode.nccl.library.script.stall_from = 1 << 30
    assert (fleet.outcome().sealed, fleet.decode.sealed.empty()) == (False, True)
    fleet.assert_still_poisoned()
    assert fleet.push().transport == "nccl", "the link did not survive a drain"


def test_an_abort_frees_the_source_blocks_while_a_send_hangs(fleet: Fleet) -> None:
    fleet.decode.nccl.library.script = Script(stall_from=0)
    plan = fleet.begin_push()
    wait_until_receiving(fleet)
    fleet.prefill.outbox.abort(plan.request_id, "disconnect")
    assert fleet.prefill.done.get(timeout=0.25).reason == "disconnect"
    fleet.decode.nccl.library.script.stall_from = 1 << 30
    assert fleet.decode.aborted.get(timeout=WAIT_S) == (plan.reservation_id, "disconnect")
    fleet.drain(plan)
    assert fleet.push().transport == "nccl"


def test_staging_memory_stays_in_quarantine_until_the_abort_is_over(fleet: Fleet) -> None:
    decode = fleet.decode.nccl
    decode.library.script = Script(fail_from=0, abort_hangs=True)
    plan = fleet.begin_push()
    assert not fleet.outcome().sealed
    fleet.drain(plan)  # the blocks are free all the same
    wait_for(lambda: decode.pairs.num_open == 1 and threads_named("nccl-abort") > 0, "no abort has begun")
    assert decode.pairs.num_stuck == 0
    decode.clock.shift_s += ABORT_LIMIT_S + 1
    assert decode.pairs.num_stuck == 1
    gc.collect()
    assert decode.device_kv.buffers[0]() is not None, "memory went while NCCL may write to it"
    with pytest.raises(PairRefused, match="restart"):
        decode.pairs.check_room()
    assert fleet.push().transport == "tcp"
    decode.library.let_abort_go.set()
    wait_for(lambda: decode.pairs.num_open == 0, "the abort is not over")
    assert decode.pairs.num_stuck == 0
    wait_for(lambda: not threads_named("nccl-abort"), "the thread is left")
    gc.collect()
    assert decode.device_kv.buffers[0]() is None


def test_after_an_abort_that_failed_memory_stays_and_no_pair_is_made_any_more() -> None:
    with open_decode("nccl") as decode, open_prefill("nccl", decode.connect) as prefill:
        fleet, end = Fleet(decode, prefill), decode.nccl
        end.library.script = Script(fail_from=0, abort_fails=True)
        plan = fleet.begin_push()
        assert not fleet.outcome().sealed
        fleet.drain(plan)
        wait_for(lambda: not threads_named("nccl-abort"), "the abort goes on")
        end.clock.shift_s += ABORT_LIMIT_S + 1
        assert (end.pairs.num_open, end.pairs.num_stuck) == (1, 1)
        gc.collect()
        assert end.device_kv.buffers[0]() is not None, "memory went while NCCL may write to it"
        assert fleet.push().transport == "tcp"


def test_a_wrong_byte_is_found_by_the_checksum(fleet: Fleet) -> None:
    fleet.decode.nccl.library.script = Script(corrupt=True)
    plan = fleet.begin_push()
    assert fleet.outcome().reason == "checksum"
    fleet.drain(plan)
    assert not any(pool.any() for pool in fleet.decode.kv.pools), "it was placed before it was checked"


def test_what_does_not_fit_into_the_staging_memory_travels_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    layer_of_a_block = LAYOUT.block_bytes // LAYOUT.num_layers
    monkeypatch.setattr(memory, "STAGING_BYTES", layer_of_a_block + 1)
    with open_decode("nccl") as decode, open_prefill("nccl", decode.connect) as prefill:
        outcome = Fleet(decode, prefill).push()
        assert (outcome.sealed, outcome.transport) == (True, "nccl")
        sizes = [len(data) for data in decode.nccl.library.received]
        assert sizes == [layer_of_a_block] * 9


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (Header(FrameKind.DATA, payload_bytes=memory.STAGING_BYTES + 1), "agreed"),
        (Header(FrameKind.DATA, payload_bytes=8, wire_dtype=WireDtype.INT8), "INT8"),
    ],
)
def test_a_payload_that_was_not_agreed_on_is_refused(header: Header, problem: str) -> None:
    with ExitStack() as stack:
        decode, prefill = (stack.enter_context(open_decode("tcp")).nccl for _ in range(2))
        unique_id = decode.pairs.unique_id()
        thread = threading.Thread(
            target=lambda: prefill.pairs.open(unique_id, rank=PREFILL_RANK, limit_s=WAIT_S)
        )
        thread.start()
        pair = decode.pairs.open(unique_id, rank=DECODE_RANK, limit_s=WAIT_S)
        thread.join(WAIT_S)
        receiver = NcclPayloadReceiver(pair, stream_pair()[0], decode.clock)
        with pytest.raises(ProtocolViolation, match=problem):
            receiver.skip(header)
        receiver.close()


def test_ids_to_which_nobody_comes_are_bounded() -> None:
    with open_decode("nccl") as decode:
        for _ in range(MAX_UNJOINED_IDS):
            decode.nccl.pairs.unique_id()
        with pytest.raises(PairRefused, match="nobody came"):
            decode.nccl.pairs.unique_id()
        assert decode.nccl.library.num_ids == MAX_UNJOINED_IDS


def wait_until_receiving(fleet: Fleet) -> None:
    library = fleet.decode.nccl.library
    wait_for(lambda: bool(library.communicators) and library.communicators[0].num_operations > 0, "idle")


def threads_named(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


def ends(fleet: Fleet) -> tuple[NcclEnd, NcclEnd]:
    return fleet.prefill.nccl, fleet.decode.nccl
