"""Bytes that lie in many pieces: gathered, scattered, hashed and copied without a call for each.

Pieces are equal in size and are told by their addresses. Long copies go past the cache, which would first read what is about to be overwritten; they need targets of whole *stripes*.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from pdserve.kernels.lanes import BYTE_POINTER, KERNEL_OPTIONS, SIZE, Builder, Value, size

Addresses = NDArray[np.uint64]
Bytes = NDArray[np.uint8]

# A cache line.
STRIPE_BYTES = 64
STRIPE = ir.VectorType(SIZE, 8)


@intrinsic
def _copy(context: Any, target: Any, source: Any, num_bytes: Any) -> Any:
    def generate(context: Any, builder: Builder, signature: Any, args: Any) -> Value:
        target, source = (builder.inttoptr(address, BYTE_POINTER) for address in args[:2])
        cgutils.raw_memcpy(builder, target, source, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64, types.intp), generate


@intrinsic
def copy_stripes(context: Any, target: Any, source: Any, num_stripes: Any) -> Any:
    """Whole stripes to an aligned target, past the cache."""

    def generate(context: Any, builder: Builder, signature: Any, args: Any) -> Value:
        target, source, num_stripes = args
        with cgutils.for_range(builder, num_stripes) as loop:
            at = builder.mul(loop.index, size(STRIPE_BYTES))
            value = load_stripe(builder, builder.add(source, at))
            stream_stripe(builder, value, builder.add(target, at))
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64, types.intp), generate


@intrinsic
def fence(context: Any) -> Any:
    """What was written past the cache is there for other threads; what was read was read before."""

    def generate(context: Any, builder: Builder, signature: Any, args: Any) -> Value:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


def load_stripe(builder: Builder, address: Value) -> Value:
    value = builder.load(builder.inttoptr(address, STRIPE.as_pointer()))
    value.align = 1
    return value


def stream_stripe(builder: Builder, value: Value, address: Value) -> None:
    store = builder.store(value, builder.inttoptr(address, STRIPE.as_pointer()))
    store.align = STRIPE_BYTES
    store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))


@njit(**KERNEL_OPTIONS)
def gather(addresses: Addresses, piece_bytes: int, begin: int, out: Bytes) -> None:
    """Bytes ``[begin, begin + len(out))`` of the pieces as one."""
    target = np.uint64(out.ctypes.data)
    done, index, offset = 0, begin // piece_bytes, begin % piece_bytes
    while done < out.size:
        part = min(piece_bytes - offset, out.size - done)
        _copy(target + np.uint64(done), addresses[index] + np.uint64(offset), part)
        done, index, offset = done + part, index + 1, 0


@njit(**KERNEL_OPTIONS)
def scatter(addresses: Addresses, piece_bytes: int, begin: int, content: Bytes) -> None:
    """The way back."""
    source = np.uint64(content.ctypes.data)
    done, index, offset = 0, begin // piece_bytes, begin % piece_bytes
    while done < content.size:
        part = min(piece_bytes - offset, content.size - done)
        target = addresses[index] + np.uint64(offset)
        if (np.int64(target) | part) % STRIPE_BYTES == 0:
            copy_stripes(target, source + np.uint64(done), part // STRIPE_BYTES)
        else:
            _copy(target, source + np.uint64(done), part)
        done, index, offset = done + part, index + 1, 0
    fence()
