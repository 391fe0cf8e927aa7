"""Rows times packed weights: the linear layers of a step, at decode's sizes and at prefill's.

A BLAS packs the weights in every call, which at decode's few rows costs more than multiplying.
Here they are packed once, for good, as panels of 16 outputs: ``[panels, in_features, 16]``. A tile of
up to 6 rows × 16 outputs stays in registers while the panel streams through, and the line
4 KiB ahead is prefetched: at few rows the limit is memory, at many it is the multiplier.

Each output is one chain of fused multiply-adds over ``in_features`` in ascending order, whatever
the number of rows: a row's result never depends on its neighbours.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from pdserve.kernels import lanes
from pdserve.kernels.lanes import KERNEL_OPTIONS, LANES

PANEL = 16
MAX_TILE_ROWS = 6
PREFETCH_BYTES = 4096
# Rows that go through all panels before the next: their inputs stay in the second-level cache.
ROW_BLOCK = 96


def packed_shape(out_features: int, in_features: int) -> tuple[int, int, int]:
    """Of the array that ``matmul`` takes as ``panels``; outputs beyond ``out_features`` are padding."""
    return -(-out_features // PANEL), in_features, PANEL


@intrinsic(prefer_literal=True)
def _tile(
    context: Any, rows: Any, width: Any, x: Any, x_at: Any, x_stride: Any, panels: Any, first: Any, y: Any,
    y_at: Any, y_stride: Any, ahead: Any,
) -> Any:  # fmt: skip
    """y[row, column] = Σ_k x[row, k] panels[first + column // 16, k, column % 16], ``rows`` × ``width`` panels.

    Offsets and strides in elements. ``ahead``: whether to prefetch (the first tile over a panel does).
    """
    num_rows, num_panels, does_prefetch = rows.literal_value, width.literal_value, ahead.literal_value
    per_panel = PANEL // LANES
    size = types.intp
    signature = types.void(rows, width, x, size, size, panels, size, y, size, size, ahead)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, x, x_at, x_stride, panels, first, y, y_at, y_stride, _ = args
        array = context.make_array(signature.args[5])(context, builder, panels)
        depth = builder.extract_value(array.shape, 1)
        panel_size = builder.mul(depth, lanes.size(PANEL))
        base = builder.gep(array.data, [builder.mul(first, panel_size)])
        starts = [builder.gep(base, [builder.mul(panel_size, lanes.size(p))]) for p in range(num_panels)]
        inputs = [
            lanes.pointer(
                context,
                builder,
                signature.args[2],
                x,
                builder.add(x_at, builder.mul(x_stride, lanes.size(r))),
            )
            for r in range(num_rows)
        ]
        sums = lanes.Registers(builder, num_rows, num_panels * per_panel)
        sums.fill(lambda row, column: lanes.constant(0.0))

        def advance(k: Any) -> None:
            at = builder.mul(k, lanes.size(PANEL))
            factors = [builder.load(builder.gep(row, [k])) for row in inputs]
            weights = [
                lanes.load(builder, builder.gep(start, [builder.add(at, lanes.size(v * LANES))]), element)
                for start in starts
                for v in range(per_panel)
            ]
            for row, scalar in enumerate(factors):
                factor = lanes.splat(builder, scalar)
                for column, weight in enumerate(weights):
                    sums.set(row, column, lanes.fma(builder, weight, factor, sums.get(row, column)))

        element = signature.args[5].dtype
        with cgutils.for_range(builder, builder.sdiv(depth, lanes.size(2))) as loop:
            k = builder.mul(loop.index, lanes.size(2))
            if does_prefetch:
                for start in starts:
                    here = builder.bitcast(
                        builder.gep(start, [builder.mul(k, lanes.size(PANEL))]), lanes.BYTE_POINTER
                    )
                    lanes.prefetch(builder, builder.gep(here, [lanes.size(PREFETCH_BYTES)]))
            advance(k)
            advance(builder.add(k, lanes.size(1)))
        with builder.if_then(builder.trunc(depth, ir.IntType(1))):
            advance(builder.sub(depth, lanes.size(1)))
        for row in range(num_rows):
            row_at = builder.add(y_at, builder.mul(y_stride, lanes.size(row)))
            for column in range(num_panels * per_panel):
                at = builder.add(row_at, lanes.size(column * LANES))
                lanes.store(
                    builder, sums.get(row, column), lanes.pointer(context, builder, signature.args[7], y, at)
                )
        return context.get_dummy_value()

    return signature, generate


@njit(**KERNEL_OPTIONS)
def matmul(
    x: NDArray[np.float32], panels: NDArray[Any], y: NDArray[np.float32], begin: int, end: int
) -> None:
    """``x``: [rows, in_features]; ``y``: [rows, panels × 16]; inner dimension contiguous in both.

    Computes panels ``begin`` up to ``end``, so that several threads can share the work.
    """
    num_rows = x.shape[0]
    x_stride, y_stride = x.strides[0] // 4, y.strides[0] // 4
    if num_rows == 1:
        _one_row(x, panels, y, begin, end)
        return
    for block in range(0, num_rows, ROW_BLOCK):
        block_end = min(block + ROW_BLOCK, num_rows)
        for panel in range(begin, end):
            _first_tile(
                x, block, block_end - block, x_stride, panels, panel, y, block * y_stride + panel * PANEL, y_stride
            )  # fmt: skip
            row = block + _tile_rows(block_end - block)
            while row < block_end:
                left = block_end - row
                at = row * y_stride + panel * PANEL
                _next_tile(x, row, left, x_stride, panels, panel, y, at, y_stride)
                row += _tile_rows(left)


@njit(**KERNEL_OPTIONS)
def _one_row(
    x: NDArray[np.float32], panels: NDArray[Any], y: NDArray[np.float32], begin: int, end: int
) -> None:
    """Four panels at once: eight chains of additions, as many as the multipliers need to be busy."""
    panel = begin
    while panel + 4 <= end:
        _tile(1, 4, x, 0, 0, panels, panel, y, panel * PANEL, 0, False)
        panel += 4
    while panel < end:
        _tile(1, 1, x, 0, 0, panels, panel, y, panel * PANEL, 0, False)
        panel += 1


@njit(**KERNEL_OPTIONS)
def _tile_rows(left: int) -> int:
    """How many of ``left`` rows the next tile takes: 7 and 8 are better as four and the rest."""
    if left == 7 or left == 8:
        return 4
    return min(left, MAX_TILE_ROWS)


def _tile_chooser(does_prefetch: bool) -> Any:
    @njit(**KERNEL_OPTIONS)
    def tile(x, row, left, x_stride, panels, panel, y, at, y_stride):
        rows = _tile_rows(left)
        x_at = row * x_stride
        if rows == 6:
            _tile(6, 1, x, x_at, x_stride, panels, panel, y, at, y_stride, does_prefetch)
        elif rows == 5:
            _tile(5, 1, x, x_at, x_stride, panels, panel, y, at, y_stride, does_prefetch)
        elif rows == 4:
            _tile(4, 1, x, x_at, x_stride, panels, panel, y, at, y_stride, does_prefetch)
        elif rows == 3:
            _tile(3, 1, x, x_at, x_stride, panels, panel, y, at, y_stride, does_prefetch)
        elif rows == 2:
            _tile(2, 1, x, x_at, x_stride, panels, panel, y, at, y_stride, does_prefetch)
        else:
            _tile(1, 1, x, x_at, x_stride, panels, panel, y, at, y_stride, does_prefetch)

    return tile


_first_tile = _tile_chooser(True)
_next_tile = _tile_chooser(False)
