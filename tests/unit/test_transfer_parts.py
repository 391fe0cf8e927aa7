"""The pure parts of the transfer: frames, coverage, what a push sends when."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import IncompatiblePeer, ProtocolViolation
from pdserve.kvcache.layout import KVLayout, PoolOrder
from pdserve.kvcache.segment import Segment, WireDtype, WireOrder
from pdserve.transfer.coverage import Coverage
from pdserve.transfer.frame import (
    HEADER_BYTES,
    MAX_CONTROL_BYTES,
    Commit,
    FrameKind,
    Header,
    unpack_header,
)
from pdserve.transfer.hello import Hello, check_compatible, wire_order
from pdserve.transfer.push import COALESCED_BYTES, Push, PushPlan

LAYOUT = KVLayout(4, 2, 8, "float32", 4, PoolOrder.HEAD_MAJOR)

small = st.integers(0, 2**16 - 1)
large = st.integers(0, 2**64 - 1)


@given(
    large,
    large,
    st.integers(0, 2**30),
    st.integers(0, 2**32 - 1),
    small,
    small,
    st.sampled_from(WireOrder),
    st.sampled_from(WireDtype),
)
def test_headers_survive_the_wire(
    reservation_id: int,
    fence: int,
    payload_bytes: int,
    sequence: int,
    number: int,
    other: int,
    order: WireOrder,
    dtype: WireDtype,
) -> None:
    segment = Segment(number, other, other, number, number, other)
    header = Header(FrameKind.DATA, reservation_id, fence, payload_bytes, sequence, segment, order, dtype)
    packed = header.pack()
    assert len(packed) == HEADER_BYTES == 64
    assert unpack_header(packed) == header


@given(st.integers(0, HEADER_BYTES * 8 - 1))
def test_a_header_with_a_wrong_bit_is_refused(bit: int) -> None:
    damaged = bytearray(Header(FrameKind.DATA, 5, 7, 4096, 2, Segment(0, 3, 0, 2, 8, 16)).pack())
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolViolation):
        unpack_header(damaged)


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_noise_is_refused_or_bounded(noise: bytes) -> None:
    try:
        header = unpack_header(noise)
    except ProtocolViolation:
        return
    assert header.payload_bytes <= 1 << 30


def test_a_control_frame_cannot_ask_for_much_memory() -> None:
    header = Header(FrameKind.COMMIT, payload_bytes=MAX_CONTROL_BYTES + 1)
    with pytest.raises(ProtocolViolation, match="over the limit"):
        unpack_header(header.pack())


def test_commits_survive_the_wire_and_have_one_size() -> None:
    commit = Commit(3, 42, 2**40, 2**64 - 1)
    assert Commit.unpack(commit.pack()) == commit
    with pytest.raises(ProtocolViolation):
        Commit.unpack(commit.pack() + b"x")


def ranks(num_heads: int, sizes: list[int]) -> list[tuple[int, int]]:
    """Head ranges of tensor-parallel ranks."""
    begins = [sum(sizes[:index]) for index in range(len(sizes))]
    return [(begin, size) for begin, size in zip(begins, sizes, strict=True) if begin + size <= num_heads]


@given(data=st.data())
def test_any_tiling_by_ranks_layers_and_chunks_covers_exactly_once(data: st.DataObject) -> None:
    num_layers, num_tokens, first = (data.draw(st.integers(1, 5)) for _ in range(3))
    head_sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    num_heads = sum(head_sizes)
    coverage = Coverage(Segment(0, num_layers, 0, num_heads, first, num_tokens))
    layer_cuts = sorted({0, num_layers, *data.draw(st.lists(st.integers(0, num_layers), max_size=3))})
    token_cuts = sorted({0, num_tokens, *data.draw(st.lists(st.integers(0, num_tokens), max_size=3))})
    segments = [
        Segment(layer, layer_end - layer, head, num, first + token, token_end - token)
        for layer, layer_end in pairwise(layer_cuts)
        for head, num in ranks(num_heads, head_sizes)
        for token, token_end in pairwise(token_cuts)
    ]
    order = data.draw(st.permutations(segments))
    for segment in order[:-1]:
        coverage.add(segment)
        assert not coverage.is_complete
        with pytest.raises(ProtocolViolation, match="overlaps"):
            coverage.add(segment)
    coverage.add(order[-1])
    assert coverage.is_complete


@pytest.mark.parametrize(
    "outside",
    [
        Segment(0, 5, 0, 2, 8, 4),
        Segment(0, 4, 1, 2, 8, 4),
        Segment(0, 4, 0, 2, 7, 4),
        Segment(0, 4, 0, 2, 8, 5),
        Segment(0, 0, 0, 2, 8, 4),
    ],
)
def test_what_is_not_owed_is_refused(outside: Segment) -> None:
    with pytest.raises(ProtocolViolation, match="outside"):
        Coverage(Segment(0, 4, 0, 2, 8, 4)).add(outside)


def push(num_tokens: int, num_cached_tokens: int, layout: KVLayout = LAYOUT) -> Push:
    plan = PushPlan("r", 1, 1, 1, b"", (), tuple(range(1, 100)), num_tokens, num_cached_tokens)
    return Push(plan, layout)


@given(
    data=st.data(),
    order=st.sampled_from(WireOrder),
    # From one block of one layer, 512 bytes, to more than everything.
    max_bytes=st.integers(512, 20_000),
)
def test_a_push_sends_every_owed_cell_once_and_nothing_before_it_is_written(
    data: st.DataObject, order: WireOrder, max_bytes: int
) -> None:
    num_tokens = data.draw(st.integers(1, 30))
    num_cached = data.draw(st.integers(0, num_tokens // 4)) * 4
    subject = push(num_tokens, num_cached)
    coverage = Coverage(Segment(0, 4, 0, 2, num_cached, num_tokens - num_cached))
    written = [0] * 4

    def drain() -> None:
        while (segment := subject.next_segment(order, max_bytes)) is not None:
            assert segment.payload_bytes(LAYOUT, order) <= max_bytes
            assert all(
                segment.token_end <= written[layer] for layer in range(segment.layer_begin, segment.layer_end)
            )
            if order is WireOrder.BLOCK:
                assert segment.token_begin % 4 == 0
                assert segment.token_end % 4 == 0 or segment.token_end == num_tokens
            coverage.add(segment)

    end = 0
    while end < num_tokens:
        end = min(num_tokens, end + data.draw(st.integers(1, 9)))
        for layer in range(4):
            written[layer] = end
            subject.layer_written(layer, end)
            if data.draw(st.booleans()):
                drain()
    assert not subject.is_ready_to_commit
    subject.commit(7, now_s=1.0)
    drain()
    assert coverage.is_complete
    assert subject.is_ready_to_commit


def test_a_link_that_is_behind_gets_larger_frames() -> None:
    layout = KVLayout(64, 8, 128, "float32", 16, PoolOrder.HEAD_MAJOR)
    subject = push(16, 0, layout)
    for layer in range(64):
        subject.layer_written(layer, 16)
    segment = subject.next_segment(WireOrder.BLOCK)
    assert segment is not None
    assert COALESCED_BYTES // 2 < segment.payload_bytes(layout, WireOrder.BLOCK) <= COALESCED_BYTES


def test_the_hidden_share_is_what_was_sent_before_the_first_token() -> None:
    subject = push(4, 0)
    subject.sent(100, 1, begin_s=0.0, end_s=1.0)
    subject.commit(7, now_s=1.5)
    subject.sent(100, 2, begin_s=1.0, end_s=2.0)
    outcome = subject.outcome(sealed=True, reason="", transport="tcp")
    assert (outcome.transfer_s, outcome.hidden_transfer_s) == (2.0, 1.5)


def test_hellos_survive_the_wire_and_differences_are_named() -> None:
    ours = Hello(2**64 - 1, "model", LAYOUT)
    assert Hello.from_dict(ours.as_dict()) == ours
    other = Hello(1, "model", KVLayout(4, 2, 8, "float16", 4, PoolOrder.HEAD_MAJOR))
    with pytest.raises(IncompatiblePeer, match=r"dtype differs: ours is 'float32', the peer's is 'float16'"):
        check_compatible(ours, other)
    longer_blocks = Hello(1, "model", KVLayout(4, 2, 8, "float32", 8, PoolOrder.HEAD_MAJOR))
    check_compatible(ours, longer_blocks)
    assert wire_order(ours, longer_blocks) is WireOrder.TOKEN
    with pytest.raises(ProtocolViolation):
        Hello.from_dict({"incarnation": "x"})
