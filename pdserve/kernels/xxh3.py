"""XXH3-64 over bytes that lie in pieces, alone or while they are copied: what the ``xxhash`` package says.

The algorithm (the xxHash specification) for long inputs and its default secret: eight 64-bit sums take in
*stripes* of 64 bytes, each with another part of the secret; after every 16 stripes they are
scrambled; the last stripe has a part of its own. Here pieces are whole stripes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from pdserve.kernels.lanes import BYTE_POINTER, KERNEL_OPTIONS, Builder, Value, pointer, prefetch, size
from pdserve.kernels.pieces import (
    STRIPE,
    STRIPE_BYTES,
    Addresses,
    copy_stripes,
    fence,
    load_stripe,
    stream_stripe,
)

Sums = NDArray[np.uint64]

MIN_BYTES = 241
_BLOCK_STRIPES = 16
_KEY_STEP_BYTES = 8
_SCRAMBLE_KEY, _LAST_KEY, _RESULT_KEY = 128, 121, 11
_PRIME32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_PRIME64 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
_FINAL_FACTOR = 0x165667919E3779F9
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
# How far ahead of the sums memory is fetched: the hardware's own guesses end with a page.
_AHEAD_STRIPES = 64


def first_sums() -> Sums:
    one, two, three = _PRIME32
    return np.array([three, *_PRIME64[:4], two, _PRIME64[4], one], dtype=np.uint64)


def result(sums: Sums, num_bytes: int) -> int:
    """``sums`` after all stripes."""
    mask = (1 << 64) - 1
    values = [int(value) for value in sums]
    total = num_bytes * _PRIME64[0]
    for pair in range(4):
        left, right = (values[2 * pair + side] ^ _key(_RESULT_KEY, 2 * pair + side) for side in (0, 1))
        product = left * right
        total += (product ^ product >> 64) & mask
    total &= mask
    total = (total ^ total >> 37) * _FINAL_FACTOR & mask
    return total ^ total >> 32


def _key(at: int, lane: int) -> int:
    begin = at + _KEY_STEP_BYTES * lane
    return int.from_bytes(_SECRET[begin : begin + _KEY_STEP_BYTES], "little")


def _taking_in(*, copies: bool) -> Callable[..., Any]:
    """Of ``num_stripes`` from ``source`` on, the first of which is number ``stripe`` of the input.

    ``following``: what will be read afterwards. ``copies``: also to ``target``, which is aligned.
    """

    def generate(context: Any, builder: Builder, signature: Any, args: Any) -> Value:
        sums_array, source, target, num_stripes, stripe, following = args
        kept = builder.bitcast(
            pointer(context, builder, signature.args[0], sums_array, size(0)), STRIPE.as_pointer()
        )
        sums = cgutils.alloca_once(builder, STRIPE)
        builder.store(_unaligned(builder.load(kept)), sums)
        secret = _secret(builder)
        turn = builder.sub(num_stripes, size(_AHEAD_STRIPES))
        with cgutils.for_range(builder, num_stripes) as loop:
            at = builder.mul(loop.index, size(STRIPE_BYTES))
            ahead = builder.select(
                builder.icmp_signed("<", loop.index, turn),
                builder.add(builder.add(source, at), size(_AHEAD_STRIPES * STRIPE_BYTES)),
                builder.add(following, builder.mul(builder.sub(loop.index, turn), size(STRIPE_BYTES))),
            )
            prefetch(builder, builder.inttoptr(ahead, BYTE_POINTER))
            value = load_stripe(builder, builder.add(source, at))
            if copies:
                stream_stripe(builder, value, builder.add(target, at))
            place = builder.urem(builder.add(stripe, loop.index), size(_BLOCK_STRIPES))
            key = _load_key(builder, secret, builder.mul(place, size(_KEY_STEP_BYTES)))
            taken = _mix(builder, builder.load(sums), value, key)
            builder.store(taken, sums)
            with builder.if_then(builder.icmp_unsigned("==", place, size(_BLOCK_STRIPES - 1))):
                key = _load_key(builder, secret, size(_SCRAMBLE_KEY))
                builder.store(_scramble(builder, taken, key), sums)
        _unaligned(builder.store(builder.load(sums), kept))
        return context.get_dummy_value()

    def typed(
        context: Any, sums: Any, source: Any, target: Any, num_stripes: Any, stripe: Any, following: Any
    ) -> Any:
        address, number = types.uint64, types.intp
        return types.void(sums, address, address, number, number, address), generate

    return typed


_hash = intrinsic(_taking_in(copies=False))
_hash_and_copy = intrinsic(_taking_in(copies=True))


@intrinsic
def _take_in_last(context: Any, sums: Any, source: Any) -> Any:
    """The last stripe of the input, which has its own key."""

    def generate(context: Any, builder: Builder, signature: Any, args: Any) -> Value:
        kept = builder.bitcast(
            pointer(context, builder, signature.args[0], args[0], size(0)), STRIPE.as_pointer()
        )
        key = _load_key(builder, _secret(builder), size(_LAST_KEY))
        mixed = _mix(builder, _unaligned(builder.load(kept)), load_stripe(builder, args[1]), key)
        _unaligned(builder.store(mixed, kept))
        return context.get_dummy_value()

    return types.void(sums, types.uint64), generate


def _secret(builder: Builder) -> Value:
    content = cgutils.make_bytearray(_SECRET)
    variable = cgutils.global_constant(builder.module, "pdserve.xxh3.secret", content)
    return builder.bitcast(variable, BYTE_POINTER)


def _load_key(builder: Builder, secret: Value, at: Value) -> Value:
    return _unaligned(builder.load(builder.bitcast(builder.gep(secret, [at]), STRIPE.as_pointer())))


def _unaligned(instruction: Value) -> Value:
    instruction.align = 1
    return instruction


def _mix(builder: Builder, sums: Value, value: Value, key: Value) -> Value:
    keyed = builder.xor(value, key)
    low = builder.and_(keyed, _each(0xFFFFFFFF))
    product = builder.mul(low, builder.lshr(keyed, _each(32)))
    swapped = builder.shuffle_vector(value, value, ir.Constant(ir.VectorType(ir.IntType(32), 8), _NEIGHBOURS))
    return builder.add(builder.add(sums, swapped), product)


_NEIGHBOURS = [1, 0, 3, 2, 5, 4, 7, 6]


def _scramble(builder: Builder, sums: Value, key: Value) -> Value:
    shifted = builder.xor(sums, builder.lshr(sums, _each(47)))
    return builder.mul(builder.xor(shifted, key), _each(_PRIME32[0]))


def _each(value: int) -> Value:
    return ir.Constant(STRIPE, [value] * 8)


@njit(**KERNEL_OPTIONS)
def hash_pieces(sums: Sums, sources: Addresses, piece_bytes: int) -> None:
    """All pieces of an input that is at least ``MIN_BYTES`` long."""
    num_stripes = piece_bytes // STRIPE_BYTES
    for piece in range(sources.size):
        source = sources[piece]
        if piece + 1 < sources.size:
            _hash(sums, source, source, num_stripes, piece * num_stripes, sources[piece + 1])
        else:
            _hash(sums, source, source, num_stripes - 1, piece * num_stripes, source)
            _take_in_last(sums, source + np.uint64(piece_bytes - STRIPE_BYTES))


@njit(**KERNEL_OPTIONS)
def copy_and_hash(
    sums: Sums, sources: Addresses, targets: Addresses, piece_bytes: int, begin: int, end: int
) -> None:
    """Pieces ``[begin, end)`` of such an input, to targets that begin at whole stripes."""
    num_stripes = piece_bytes // STRIPE_BYTES
    for piece in range(begin, end):
        source, target, first = sources[piece], targets[piece], piece * num_stripes
        if piece + 1 < sources.size:
            _hash_and_copy(sums, source, target, num_stripes, first, sources[piece + 1])
        else:
            last = np.uint64(piece_bytes - STRIPE_BYTES)
            _hash_and_copy(sums, source, target, num_stripes - 1, first, source)
            _take_in_last(sums, source + last)
            copy_stripes(target + last, source + last, 1)
    fence()
