"""Pieces of memory: moved whole and in parts, and hashed as the ``xxhash`` package hashes them."""

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from pdserve.kernels import pieces, xxh3
from pdserve.kernels.pieces import STRIPE_BYTES, Addresses, Bytes


def memory(num_bytes: int, *, seed: int) -> Bytes:
    """Begins at a whole stripe."""
    content = np.random.default_rng(seed).integers(0, 256, num_bytes + STRIPE_BYTES, dtype=np.uint8)
    begin = -content.ctypes.data % STRIPE_BYTES
    return content[begin : begin + num_bytes]


def places(content: Bytes, piece_bytes: int, order: list[int]) -> Addresses:
    return np.uint64(content.ctypes.data) + np.array(order, dtype=np.uint64) * np.uint64(piece_bytes)


def in_order(content: Bytes, piece_bytes: int, order: list[int]) -> bytes:
    return b"".join(content[piece_bytes * index :][:piece_bytes].tobytes() for index in order)


orders = st.permutations(range(9)).flatmap(lambda order: st.integers(1, 9).map(lambda count: order[:count]))


@given(st.sampled_from([1, 5, 64, 100, 192]), orders, st.data())
def test_any_part_is_gathered_and_scattered(piece_bytes: int, order: list[int], data: st.DataObject) -> None:
    source, target = (memory(9 * piece_bytes, seed=seed) for seed in (1, 2))
    whole = in_order(source, piece_bytes, order)
    begin = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(begin, len(whole)))
    expected = bytearray(in_order(target, piece_bytes, list(range(9))))
    for at in range(begin, end):
        expected[order[at // piece_bytes] * piece_bytes + at % piece_bytes] = whole[at]
    part = np.zeros(end - begin, np.uint8)
    pieces.gather(places(source, piece_bytes, order), piece_bytes, begin, part)
    assert part.tobytes() == whole[begin:end]
    pieces.scatter(places(target, piece_bytes, order), piece_bytes, begin, part)
    assert target.tobytes() == expected


@given(st.sampled_from([1, 2, 15, 16, 17, 33, 192]), orders, st.integers(0, 9))
def test_pieces_are_hashed_and_copied_as_one(num_stripes: int, order: list[int], cut: int) -> None:
    piece_bytes = num_stripes * STRIPE_BYTES
    if len(order) * piece_bytes < xxh3.MIN_BYTES:
        return
    source, target = (memory(9 * piece_bytes, seed=seed) for seed in (1, 2))
    untouched = [index for index in range(9) if index not in order]
    before = in_order(target, piece_bytes, untouched)
    sources, targets = (places(content, piece_bytes, order) for content in (source, target))
    whole = in_order(source, piece_bytes, order)
    expected = xxhash.xxh3_64_intdigest(whole)

    sums = xxh3.first_sums()
    xxh3.hash_pieces(sums, sources, piece_bytes)
    assert xxh3.result(sums, len(whole)) == expected

    sums, cut = xxh3.first_sums(), min(cut, len(order))
    xxh3.copy_and_hash(sums, sources, targets, piece_bytes, 0, cut)
    xxh3.copy_and_hash(sums, sources, targets, piece_bytes, cut, len(order))
    assert xxh3.result(sums, len(whole)) == expected
    assert in_order(target, piece_bytes, order) == whole
    assert in_order(target, piece_bytes, untouched) == before


@pytest.mark.parametrize("num_bytes", [256, 1024, 1088, 2048, 1 << 16])
def test_every_byte_and_every_place_counts(num_bytes: int) -> None:
    content = memory(num_bytes, seed=3)

    def checksum() -> int:
        sums = xxh3.first_sums()
        xxh3.hash_pieces(sums, places(content, num_bytes, [0]), num_bytes)
        return xxh3.result(sums, num_bytes)

    right = checksum()
    for at in (0, num_bytes // 2, num_bytes - 1):
        content[at] ^= 1
        assert checksum() != right
        content[at] ^= 1
    assert checksum() == right
