"""Queries over paged KV: softmax(q Kᵀ · scale) V for every row of a batch, decode and prefill alike.

A prompt's chunk and a decoding sequence differ only in how many queries they have, and both come
here: rows of one KV head (its queries times the query heads that share it) go through the blocks in
groups, so that a block is read once for a group. Scores of a group are kept whole, so there is one
pass for the maximum and one for the sum.

Each score is eight lanes of multiply-adds over the head, each output one chain over the tokens in
ascending order, and masked tokens add exact zeros: a query's result has the same bits whether it
came alone or in any chunk.

KV pools are ``[blocks, kv_heads, block_size, cell]``. A cell is one token and head: ``head_dim``
elements, or, where it is quantized (int8, float8), as many bytes and behind them their float32 scale.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from pdserve.kernels import lanes
from pdserve.kernels.lanes import KERNEL_OPTIONS, LANES

TILE_ROWS = 3
TILE_TOKENS = 4
TILE_COLUMNS = 4  # vectors of the output that stay in registers: 3 × 4, and 4 left for operands
GROUP_ROWS = 24
# Scores of a group, in floats: what stays in the second-level cache beside the blocks.
GROUP_SCORES = 65_536
LINE_BYTES = 64
PREFETCH_BLOCKS = 4
SCALE_BYTES = 4


def num_scratch_floats(num_context: int, head_dim: int, group: int) -> int:
    """Size of ``scratch`` for ``attend``: a group's queries, outputs, sums and scores."""
    rows = _group_rows(num_context, group)
    return rows * (2 * head_dim + 1 + num_context + LANES)


@njit(**KERNEL_OPTIONS)
def _group_rows(num_context: int, group: int) -> int:
    """A multiple of ``group``, so that a group is whole queries."""
    rows = min(GROUP_ROWS, max(TILE_ROWS, GROUP_SCORES // num_context))
    return max(1, rows // group) * group


@intrinsic(prefer_literal=True)
def _score_tile(
    context: Any, rows: Any, tokens: Any, head_dim: Any, q: Any, q_at: Any, pool: Any, k_at: Any, cell: Any,
    scores: Any, s_at: Any, s_stride: Any, scale: Any, next_pool: Any, next_at: Any,
) -> Any:  # fmt: skip
    """scores[row, token] = scale · q[row] · k[token].

    ``q``: rows of ``head_dim``; ``cell``: elements between tokens. Meanwhile as many cells of ``next_pool`` from ``next_at`` on are prefetched.
    """
    num_rows, num_tokens, dim = rows.literal_value, tokens.literal_value, head_dim.literal_value
    size = types.intp
    signature = types.void(
        rows, tokens, head_dim, q, size, pool, size, size, scores, size, size, types.float32, next_pool, size
    )

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, _, q, q_at, pool, k_at, cell, scores, s_at, s_stride, scale, next_pool, next_at = args
        upcoming = lanes.pointer(context, builder, signature.args[12], next_pool, next_at)
        queries = lanes.pointer(context, builder, signature.args[3], q, q_at)
        keys = lanes.pointer(context, builder, signature.args[5], pool, k_at)
        out = lanes.pointer(context, builder, signature.args[8], scores, s_at)
        element = signature.args[5].dtype
        cells = [builder.gep(keys, [builder.mul(cell, lanes.size(t))]) for t in range(num_tokens)]
        sums = [[lanes.constant(0.0)] * num_tokens for _ in range(num_rows)]
        for d in range(0, dim, LANES):
            query = [
                lanes.load(builder, builder.gep(queries, [lanes.size(r * dim + d)]), types.float32)
                for r in range(num_rows)
            ]
            for t in range(num_tokens):
                if _begins_line(d, element):
                    at = builder.add(builder.mul(cell, lanes.size(t)), lanes.size(d))
                    lanes.prefetch(builder, builder.gep(upcoming, [at]))
                key = lanes.load(builder, builder.gep(cells[t], [lanes.size(d)]), element)
                for r in range(num_rows):
                    sums[r][t] = lanes.fma(builder, key, query[r], sums[r][t])
        scales = [
            builder.fmul(scale, _cell_scale(builder, address, dim, element))
            if _is_quantized(element)
            else scale
            for address in cells
        ]
        for r in range(num_rows):
            row = builder.gep(out, [builder.mul(s_stride, lanes.size(r))])
            if num_tokens == TILE_TOKENS:
                four = lanes.sums_of_four(builder, sums[r])
                values = [builder.extract_element(four, ir.Constant(lanes.INT, t)) for t in range(4)]
            else:
                values = [lanes.sum_lanes(builder, vector) for vector in sums[r]]
            for t, value in enumerate(values):
                builder.store(builder.fmul(value, scales[t]), builder.gep(row, [lanes.size(t)]))
        return context.get_dummy_value()

    return signature, generate


def _begins_line(element_index: int, element: Any) -> bool:
    return element_index * element.bitwidth // 8 % LINE_BYTES == 0


def _is_quantized(element: Any) -> bool:
    return element in lanes.LARGEST


def _cell_scale(builder: Any, cell: Any, head_dim: int, element: Any) -> Any:
    """The float behind a quantized cell's elements, times what a loaded element lacks."""
    address = builder.bitcast(builder.gep(cell, [lanes.size(head_dim)]), lanes.FLOAT.as_pointer())
    value = builder.load(address)
    value.align = 1
    return builder.fmul(value, lanes.FLOAT(lanes.UNIT[element]))


@intrinsic(prefer_literal=True)
def _accumulate(
    context: Any, rows: Any, head_dim: Any, scores: Any, s_at: Any, s_stride: Any, pool: Any, v_at: Any,
    cell: Any, num_tokens: Any, out: Any, o_at: Any, next_pool: Any, next_at: Any,
) -> Any:  # fmt: skip
    """out[row] += Σ_t scores[row, t] · v[t] over ``num_tokens`` adjacent cells.

    ``out``: rows of ``head_dim``. Prefetches like ``_score_tile``.
    """
    num_rows, dim = rows.literal_value, head_dim.literal_value
    size = types.intp
    signature = types.void(
        rows, head_dim, scores, size, size, pool, size, size, size, out, size, next_pool, size
    )

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, scores, s_at, s_stride, pool, v_at, cell, num_tokens, out, o_at, next_pool, next_at = args
        upcoming = lanes.pointer(context, builder, signature.args[11], next_pool, next_at)
        weights = lanes.pointer(context, builder, signature.args[2], scores, s_at)
        values = lanes.pointer(context, builder, signature.args[5], pool, v_at)
        outputs = lanes.pointer(context, builder, signature.args[9], out, o_at)
        element = signature.args[5].dtype
        weight_rows = [builder.gep(weights, [builder.mul(s_stride, lanes.size(r))]) for r in range(num_rows)]
        for begin in range(0, dim, TILE_COLUMNS * LANES):
            columns = range(begin, min(begin + TILE_COLUMNS * LANES, dim), LANES)
            sums = lanes.Registers(builder, num_rows, len(columns))
            at = [[builder.gep(outputs, [lanes.size(r * dim + d)]) for d in columns] for r in range(num_rows)]
            sums.fill(lambda r, c, at=at: lanes.load(builder, at[r][c], types.float32))
            with cgutils.for_range(builder, num_tokens) as loop:
                cell_at = builder.mul(loop.index, cell)
                token = builder.gep(values, [cell_at])
                factors = [builder.load(builder.gep(row, [loop.index])) for row in weight_rows]
                if _is_quantized(element):
                    scale = _cell_scale(builder, token, dim, element)
                    factors = [builder.fmul(factor, scale) for factor in factors]
                factors = [lanes.splat(builder, factor) for factor in factors]
                for column, d in enumerate(columns):
                    if _begins_line(d, element):
                        lanes.prefetch(builder, builder.gep(upcoming, [builder.add(cell_at, lanes.size(d))]))
                    value = lanes.load(builder, builder.gep(token, [lanes.size(d)]), element)
                    for r in range(num_rows):
                        sums.set(r, column, lanes.fma(builder, factors[r], value, sums.get(r, column)))
            for r in range(num_rows):
                for column in range(len(columns)):
                    lanes.store(builder, sums.get(r, column), at[r][column])
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def _softmax(context: Any, scores: Any, at: Any, num_vectors: Any) -> Any:
    """In place, not yet divided: scores become exp(score - maximum); returns their sum. -inf becomes 0."""
    signature = types.float32(scores, types.intp, types.intp)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        row = lanes.pointer(context, builder, signature.args[0], args[0], args[1])
        state = lanes.Registers(builder, 1, 1)

        def each() -> Any:
            return cgutils.for_range(builder, args[2])

        def vector(loop: Any) -> Any:
            return builder.gep(row, [builder.mul(loop.index, lanes.size(LANES))])

        state.set(0, 0, lanes.constant(float("-inf")))
        with each() as loop:
            value = lanes.load(builder, vector(loop), types.float32)
            state.set(0, 0, lanes.maximum(builder, value, state.get(0, 0)))
        maximum = lanes.splat(builder, lanes.largest_lane(builder, state.get(0, 0)))
        state.set(0, 0, lanes.constant(0.0))
        with each() as loop:
            value = builder.fsub(lanes.load(builder, vector(loop), types.float32), maximum)
            value = lanes.exp(builder, value)
            lanes.store(builder, value, vector(loop))
            state.set(0, 0, builder.fadd(state.get(0, 0), value))
        return lanes.sum_lanes(builder, state.get(0, 0))

    return signature, generate


@intrinsic
def _softcap(context: Any, scores: Any, at: Any, num_vectors: Any, cap: Any) -> Any:
    """In place: cap · tanh(score / cap), as 1 - 2 / (exp(2x) + 1)."""
    signature = types.void(scores, types.intp, types.intp, types.float32)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        row = lanes.pointer(context, builder, signature.args[0], args[0], args[1])
        cap = lanes.splat(builder, args[3])
        with cgutils.for_range(builder, args[2]) as loop:
            address = builder.gep(row, [builder.mul(loop.index, lanes.size(LANES))])
            value = lanes.load(builder, address, types.float32)
            doubled = builder.fdiv(builder.fmul(value, lanes.constant(2.0)), cap)
            power = builder.fadd(lanes.exp(builder, doubled), lanes.constant(1.0))
            tanh = builder.fsub(lanes.constant(1.0), builder.fdiv(lanes.constant(2.0), power))
            lanes.store(builder, builder.fmul(cap, tanh), address)
        return context.get_dummy_value()

    return signature, generate


@cache
def attend_kernel(head_dim: int, group: int) -> Any:
    """The kernel for heads of ``head_dim``, ``group`` query heads to a KV head.

    ``attend(query, k_pool, v_pool, out, query_begin, num_queries, num_context, tables, window, scale, cap,
    scratch, kv_begin, kv_end)``: query, out ``[tokens, heads, head_dim]`` (out contiguous); per row its first
    query, their number and its tokens, the last of which are the queries; ``tables`` ``[rows, blocks]``;
    ``window`` and ``cap`` 0 for none; KV heads ``kv_begin`` up to ``kv_end``, so that threads can share.
    """

    @njit(**KERNEL_OPTIONS)
    def score(q, q_at, rows, pool, k_at, cell, num_tokens, scores, s_at, s_stride, scale, next_pool, next_at):
        """Up to three rows against a run of adjacent cells."""
        t = 0
        while t + TILE_TOKENS <= num_tokens:
            k, s, n = k_at + t * cell, s_at + t, next_at + t * cell
            if rows == 3:
                _score_tile(3, 4, head_dim, q, q_at, pool, k, cell, scores, s, s_stride, scale, next_pool, n)
            elif rows == 2:
                _score_tile(2, 4, head_dim, q, q_at, pool, k, cell, scores, s, s_stride, scale, next_pool, n)
            else:
                _score_tile(1, 4, head_dim, q, q_at, pool, k, cell, scores, s, s_stride, scale, next_pool, n)
            t += TILE_TOKENS
        while t < num_tokens:
            k, n = k_at + t * cell, next_at + t * cell
            for row in range(rows):
                r, s = q_at + row * head_dim, s_at + row * s_stride + t
                _score_tile(1, 1, head_dim, q, r, pool, k, cell, scores, s, s_stride, scale, next_pool, n)
            t += 1

    @njit(**KERNEL_OPTIONS)
    def accumulate(
        scores, s_at, s_stride, rows, pool, v_at, cell, num_tokens, out, o_at, next_pool, next_at
    ):  # fmt: skip
        """Up to three rows of weights over a run of adjacent cells."""
        if rows == 3:
            _accumulate(
                3, head_dim, scores, s_at, s_stride, pool, v_at, cell, num_tokens, out, o_at, next_pool, next_at
            )  # fmt: skip
        elif rows == 2:
            _accumulate(
                2, head_dim, scores, s_at, s_stride, pool, v_at, cell, num_tokens, out, o_at, next_pool, next_at
            )  # fmt: skip
        else:
            _accumulate(
                1, head_dim, scores, s_at, s_stride, pool, v_at, cell, num_tokens, out, o_at, next_pool, next_at
            )  # fmt: skip

    @njit(**KERNEL_OPTIONS)
    def block_at(table, block, kv_head, pool):
        return (table[block] * pool.shape[1] + kv_head) * (pool.shape[2] * pool.shape[3])

    @njit(**KERNEL_OPTIONS)
    def all_scores(queries, rows, k_pool, v_pool, table, kv_head, begin, end, scores, s_stride, scale):
        block_size, cell = k_pool.shape[2], k_pool.shape[3]
        token = begin
        while token < end:
            block, offset = token // block_size, token % block_size
            run = min(block_size - offset, end - token)
            at = block_at(table, block, kv_head, k_pool) + offset * cell
            upcoming, next_pool = token + PREFETCH_BLOCKS * block_size, k_pool
            if upcoming >= end:  # the values come next, from their beginning
                upcoming, next_pool = begin + (upcoming - end) // block_size * block_size, v_pool
                upcoming = min(upcoming, end - 1)
            next_at = block_at(table, upcoming // block_size, kv_head, next_pool)
            for row in range(0, rows, TILE_ROWS):
                score(
                    queries, row * head_dim, min(rows - row, TILE_ROWS), k_pool, at, cell, run,
                    scores, row * s_stride + token - begin, s_stride, scale, next_pool, next_at,
                )  # fmt: skip
            token += run

    @njit(**KERNEL_OPTIONS)
    def all_values(scores, s_stride, rows, v_pool, table, kv_head, begin, end, outputs):
        block_size, cell = v_pool.shape[2], v_pool.shape[3]
        token = begin
        while token < end:
            block, offset = token // block_size, token % block_size
            run = min(block_size - offset, end - token)
            at = block_at(table, block, kv_head, v_pool) + offset * cell
            upcoming = min(token + PREFETCH_BLOCKS * block_size, end - 1)
            next_at = block_at(table, upcoming // block_size, kv_head, v_pool)
            for row in range(0, rows, TILE_ROWS):
                accumulate(
                    scores, row * s_stride + token - begin, s_stride, min(rows - row, TILE_ROWS), v_pool, at, cell,
                    run, outputs, row * head_dim, v_pool, next_at,
                )  # fmt: skip
            token += run

    @njit(**KERNEL_OPTIONS)
    def softmax_rows(scores, s_stride, rows, begin, end, window, cap, sums):
        """Masks and exponentiates scores of tokens ``begin`` up to ``end``; the last query sees all of them."""
        num_vectors = s_stride // LANES
        for row in range(rows):
            at = row * s_stride
            seen_end = end - (rows - 1 - row) // group
            seen_begin = max(begin, seen_end - window) if window > 0 else begin
            if cap > 0:
                _softcap(scores, at, num_vectors, cap)
            scores[at : at + seen_begin - begin] = -np.inf
            scores[at + seen_end - begin : at + s_stride] = -np.inf
            sums[row] = _softmax(scores, at, num_vectors)

    @njit(**KERNEL_OPTIONS)
    def attend_group(
        query, out, first, count, kv_head, k_pool, v_pool, table, end, window, scale, cap, scratch
    ):
        """``count`` queries from ``first`` on, the last of which sees ``end`` tokens."""
        rows = count * group
        begin = max(0, end - count + 1 - window) // LANES * LANES if window > 0 else 0
        s_stride = (end - begin + LANES - 1) // LANES * LANES
        queries, outputs, sums, scores = (
            scratch[: rows * head_dim],
            scratch[rows * head_dim : 2 * rows * head_dim],
            scratch[2 * rows * head_dim : 2 * rows * head_dim + rows],
            scratch[2 * rows * head_dim + rows :],
        )
        for row in range(rows):
            token, head = first + row // group, kv_head * group + row % group
            for d in range(head_dim):
                queries[row * head_dim + d] = query[token, head, d]
        outputs[:] = 0
        all_scores(queries, rows, k_pool, v_pool, table, kv_head, begin, end, scores, s_stride, scale)
        softmax_rows(scores, s_stride, rows, begin, end, window, cap, sums)
        all_values(scores, s_stride, rows, v_pool, table, kv_head, begin, end, outputs)
        for row in range(rows):
            token, head = first + row // group, kv_head * group + row % group
            for d in range(head_dim):
                out[token, head, d] = outputs[row * head_dim + d] / sums[row]

    @njit(**KERNEL_OPTIONS)
    def attend(
        query, k_pool, v_pool, out, query_begin, num_queries, num_context, tables, window, scale, cap, scratch,
        kv_begin, kv_end,
    ):  # fmt: skip
        for row in range(len(num_queries)):
            step = _group_rows(num_context[row], group) // group
            for kv_head in range(kv_begin, kv_end):
                for first in range(0, num_queries[row], step):
                    count = min(step, num_queries[row] - first)
                    attend_group(
                        query, out, query_begin[row] + first, count, kv_head, k_pool, v_pool, tables[row],
                        num_context[row] - num_queries[row] + first + count, window, scale, cap, scratch,
                    )  # fmt: skip

    return attend
