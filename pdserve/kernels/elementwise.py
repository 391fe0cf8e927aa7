"""What lies between the matrix products: norms, rotary embedding, activation, KV write."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from pdserve.kernels import lanes
from pdserve.kernels.lanes import KERNEL_OPTIONS, LANES

Floats = NDArray[np.float32]


@intrinsic
def _sum_of_squares(context: Any, x: Any, at: Any, num_vectors: Any) -> Any:
    signature = types.float32(x, types.intp, types.intp)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        row = lanes.pointer(context, builder, signature.args[0], args[0], args[1])
        total = lanes.Registers(builder, 1, 1)
        total.set(0, 0, lanes.constant(0.0))
        with cgutils.for_range(builder, args[2]) as loop:
            address = builder.gep(row, [builder.mul(loop.index, lanes.size(LANES))])
            value = lanes.load(builder, address, types.float32)
            total.set(0, 0, lanes.fma(builder, value, value, total.get(0, 0)))
        return lanes.sum_lanes(builder, total.get(0, 0))

    return signature, generate


@njit(**KERNEL_OPTIONS)
def rms_norm(x: Floats, weight: Floats, epsilon: float, out: Floats) -> None:
    """out = x / rms(x) · weight for each row (arXiv 1910.07467). ``x``: [rows, features], contiguous rows."""
    features = x.shape[1]
    whole = features // LANES
    for row in range(x.shape[0]):
        total = _sum_of_squares(x, row * (x.strides[0] // 4), whole)
        for i in range(whole * LANES, features):
            total += x[row, i] * x[row, i]
        factor = np.float32(1) / np.sqrt(total / np.float32(features) + np.float32(epsilon))
        for i in range(features):
            out[row, i] = x[row, i] * factor * weight[i]


@njit(**KERNEL_OPTIONS)
def rms_norm_heads(x: Floats, weight: Floats, epsilon: float) -> None:
    """In place, each head by itself. ``x``: [tokens, heads, head_dim], ``head_dim`` a multiple of 8."""
    token_stride, head_stride, head_dim = x.strides[0] // 4, x.strides[1] // 4, x.shape[2]
    for token in range(x.shape[0]):
        for head in range(x.shape[1]):
            total = _sum_of_squares(x, token * token_stride + head * head_stride, head_dim // LANES)
            factor = np.float32(1) / np.sqrt(total / np.float32(head_dim) + np.float32(epsilon))
            for i in range(head_dim):
                x[token, head, i] = x[token, head, i] * factor * weight[i]


@njit(**KERNEL_OPTIONS)
def add(x: Floats, delta: Floats) -> None:
    """x += delta, row by row: ``delta`` may have padding behind its rows."""
    for row in range(x.shape[0]):
        for i in range(x.shape[1]):
            x[row, i] += delta[row, i]


@njit(**KERNEL_OPTIONS)
def rotate(states: Floats, cos: Floats, sin: Floats) -> None:
    """Rotary embedding in place (arXiv 2104.09864), halves of a head as pairs, as transformers does it.

    ``states``: [tokens, heads, head_dim]; ``cos``, ``sin``: [tokens, rotated], rotated ≤ head_dim.
    """
    half = cos.shape[1] // 2
    for token in range(states.shape[0]):
        for head in range(states.shape[1]):
            for i in range(half):
                a, b = states[token, head, i], states[token, head, half + i]
                states[token, head, i] = a * cos[token, i] - b * sin[token, i]
                states[token, head, half + i] = b * cos[token, half + i] + a * sin[token, half + i]


@intrinsic
def _silu_mul(context: Any, x: Any, gate_at: Any, up_at: Any, out: Any, out_at: Any, num_vectors: Any) -> Any:
    signature = types.void(x, types.intp, types.intp, out, types.intp, types.intp)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, gate_at, up_at, out, out_at, num_vectors = args
        gates, ups = (lanes.pointer(context, builder, signature.args[0], x, at) for at in (gate_at, up_at))
        outs = lanes.pointer(context, builder, signature.args[3], out, out_at)
        with cgutils.for_range(builder, num_vectors) as loop:
            at = builder.mul(loop.index, lanes.size(LANES))
            gate, up = (lanes.load(builder, builder.gep(p, [at]), types.float32) for p in (gates, ups))
            power = lanes.exp(builder, builder.fsub(lanes.constant(0.0), gate))
            value = builder.fdiv(builder.fmul(gate, up), builder.fadd(lanes.constant(1.0), power))
            lanes.store(builder, value, builder.gep(outs, [at]))
        return context.get_dummy_value()

    return signature, generate


@njit(**KERNEL_OPTIONS)
def silu_mul(gate_up: Floats, out: Floats) -> None:
    """out = silu(gate) · up. ``gate_up``: [rows, 2 × features], ``features`` a multiple of 8."""
    features = out.shape[1]
    for row in range(out.shape[0]):
        at = row * (gate_up.strides[0] // 4)
        _silu_mul(gate_up, at, at + features, out, row * (out.strides[0] // 4), features // LANES)


@intrinsic
def _store_cell(context: Any, x: Any, x_at: Any, pool: Any, at: Any, head_dim: Any) -> Any:
    """``head_dim`` floats into the pool's element type, rounded to nearest."""
    signature = types.void(x, types.intp, pool, types.intp, types.intp)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, x_at, pool, at, head_dim = args
        source = lanes.pointer(context, builder, signature.args[0], x, x_at)
        target = lanes.pointer(context, builder, signature.args[2], pool, at)
        with cgutils.for_range(builder, builder.sdiv(head_dim, lanes.size(LANES))) as loop:
            d = builder.mul(loop.index, lanes.size(LANES))
            value = lanes.load(builder, builder.gep(source, [d]), types.float32)
            lanes.store_as(builder, value, builder.gep(target, [d]), signature.args[2].dtype)
        return context.get_dummy_value()

    return signature, generate


@njit(**KERNEL_OPTIONS)
def write_kv(states: Floats, pool: NDArray[Any], slots: NDArray[np.int64]) -> None:
    """``states``: [tokens, kv_heads, head_dim], contiguous heads; ``pool`` as in ``attention``.

    ``slots``: [tokens], each block * block_size + offset. ``head_dim``: a multiple of 8.
    """
    num_heads, block_size, cell = pool.shape[1], pool.shape[2], pool.shape[3]
    token_stride, head_stride = states.strides[0] // 4, states.strides[1] // 4
    for token in range(states.shape[0]):
        block, offset = slots[token] // block_size, slots[token] % block_size
        for head in range(num_heads):
            at = ((block * num_heads + head) * block_size + offset) * cell
            _store_cell(states, token * token_stride + head * head_stride, pool, at, states.shape[2])


@intrinsic
def _quantize_cell(context: Any, x: Any, x_at: Any, pool: Any, at: Any, head_dim: Any) -> Any:
    """Symmetric: the largest magnitude becomes the type's largest; the float32 scale goes behind the elements."""
    signature = types.void(x, types.intp, pool, types.intp, types.intp)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, x_at, pool, at, head_dim = args
        source = lanes.pointer(context, builder, signature.args[0], x, x_at)
        target = lanes.pointer(context, builder, signature.args[2], pool, at)
        element = signature.args[2].dtype
        num_vectors = builder.sdiv(head_dim, lanes.size(LANES))
        largest = lanes.Registers(builder, 1, 1)
        largest.set(0, 0, lanes.constant(1e-20))  # a cell of zeros has a scale too
        with cgutils.for_range(builder, num_vectors) as loop:
            value = lanes.load(
                builder, builder.gep(source, [builder.mul(loop.index, lanes.size(LANES))]), types.float32
            )
            negative = builder.fsub(lanes.constant(0.0), value)
            magnitude = lanes.maximum(builder, value, negative)
            largest.set(0, 0, lanes.maximum(builder, magnitude, largest.get(0, 0)))
        scale = builder.fdiv(
            lanes.largest_lane(builder, largest.get(0, 0)), lanes.FLOAT(lanes.LARGEST[element])
        )
        behind = builder.bitcast(builder.gep(target, [head_dim]), lanes.FLOAT.as_pointer())
        builder.store(scale, behind).align = 1
        divisor = lanes.splat(builder, builder.fmul(scale, lanes.FLOAT(lanes.UNIT[element])))
        with cgutils.for_range(builder, num_vectors) as loop:
            d = builder.mul(loop.index, lanes.size(LANES))
            value = builder.fdiv(lanes.load(builder, builder.gep(source, [d]), types.float32), divisor)
            lanes.store_as(builder, value, builder.gep(target, [d]), element)
        return context.get_dummy_value()

    return signature, generate


@njit(**KERNEL_OPTIONS)
def quantize_kv(states: Floats, pool: NDArray[Any], slots: NDArray[np.int64]) -> None:
    """Like ``write_kv``, into cells of int8 or float8."""
    num_heads, block_size, cell = pool.shape[1], pool.shape[2], pool.shape[3]
    token_stride, head_stride = states.strides[0] // 4, states.strides[1] // 4
    for token in range(states.shape[0]):
        block, offset = slots[token] // block_size, slots[token] % block_size
        for head in range(num_heads):
            at = ((block * num_heads + head) * block_size + offset) * cell
            _quantize_cell(states, token * token_stride + head * head_stride, pool, at, states.shape[2])
