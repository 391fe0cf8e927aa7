"""The attention kernel against the plain reference, and against itself in other chunks."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.kvcache.layout import QUANTIZED_DTYPES, KVLayout, PoolOrder
from pdserve.kvcache.storage import KVStorage
from pdserve.model.attention.base import AttentionParams, Rows
from pdserve.model.attention.kernel import KernelAttention
from pdserve.model.attention.reference import ReferenceAttention
from pdserve.model.cpu_threads import CpuThreads

NUM_BLOCKS = 64
# head_dim and queries to a KV head, between them every remainder of a tile; each is compiled once a dtype.
COMPILED = [(8, 1), (24, 2), (64, 3), (40, 7)]


@dataclass(frozen=True, slots=True)
class Shape:
    head_dim: int
    num_kv_heads: int
    group: int
    block_size: int
    params: AttentionParams


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    head_dim, group = draw(st.sampled_from(COMPILED))
    params = AttentionParams(
        scale=draw(st.sampled_from([head_dim**-0.5, 0.3])),
        window=draw(st.sampled_from([None, 1, 5, 33])),
        softcap=draw(st.sampled_from([None, 3.0])),
    )
    block_size = draw(st.sampled_from([1, 4, 16, 17]))
    return Shape(head_dim, draw(st.integers(1, 3)), group, block_size, params)


def storage_for(shape: Shape, dtype: str) -> KVStorage:
    layout = KVLayout(1, shape.num_kv_heads, shape.head_dim, dtype, shape.block_size, PoolOrder.HEAD_MAJOR)
    return KVStorage(layout, num_blocks=NUM_BLOCKS)


def chunk(table: np.ndarray, begin: int, end: int, block_size: int) -> Rows:
    """Tokens ``begin`` up to ``end`` of the only sequence."""
    positions = np.arange(begin, end)
    return Rows(
        query_begin=np.array([0]),
        num_queries=np.array([end - begin]),
        num_context=np.array([end]),
        block_tables=table.reshape(1, -1),
        slot_mapping=table[positions // block_size] * block_size + positions % block_size,
    )


def run_in_chunks(
    backend: KernelAttention | ReferenceAttention,
    shape: Shape,
    ends: list[int],
    seed: int,
    *,
    is_written: bool = False,
) -> torch.Tensor:
    """The whole sequence through one layer, a chunk at a time; ``is_written``: its KV lies there already."""
    generator = torch.Generator().manual_seed(seed)
    heads = shape.num_kv_heads * shape.group
    query = torch.randn(ends[-1], heads, shape.head_dim, generator=generator)
    key, value = (
        torch.randn(ends[-1], shape.num_kv_heads, shape.head_dim, generator=generator) for _ in range(2)
    )
    table = np.random.default_rng(seed).permutation(np.arange(1, NUM_BLOCKS))
    outputs = []
    for begin, end in zip([0, *ends], ends, strict=False):
        rows = chunk(table, begin, end, shape.block_size)
        if not is_written:
            backend.write(0, key[begin:end], value[begin:end], rows)
        outputs.append(backend.attend(0, query[begin:end], rows, shape.params))
    return torch.cat(outputs)


def chunk_ends(draw: st.DataObject, num_tokens: int) -> list[int]:
    cuts = draw.draw(st.sets(st.integers(1, num_tokens), max_size=6))
    return sorted({*cuts, num_tokens})


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", *QUANTIZED_DTYPES])
@given(shape=shapes(), data=st.data())
@settings(max_examples=20, deadline=None)
def test_it_agrees_with_the_reference_on_the_same_pool(dtype: str, shape: Shape, data: st.DataObject) -> None:
    num_tokens = data.draw(st.integers(1, min(150, (NUM_BLOCKS - 1) * shape.block_size)))
    ends = chunk_ends(data, num_tokens)
    storage = storage_for(shape, dtype)
    got = run_in_chunks(KernelAttention(storage, CpuThreads(1)), shape, ends, seed=3)
    expected = run_in_chunks(ReferenceAttention(storage), shape, ends, seed=3, is_written=True)
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", *QUANTIZED_DTYPES])
@given(shape=shapes(), data=st.data())
@settings(max_examples=20, deadline=None)
def test_a_query_has_the_same_bits_in_every_chunk(dtype: str, shape: Shape, data: st.DataObject) -> None:
    num_tokens = data.draw(st.integers(1, min(150, (NUM_BLOCKS - 1) * shape.block_size)))
    outputs = [
        run_in_chunks(KernelAttention(storage_for(shape, dtype), CpuThreads(1)), shape, ends, seed=4)
        for ends in (chunk_ends(data, num_tokens), chunk_ends(data, num_tokens))
    ]
    assert torch.equal(*outputs)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", *QUANTIZED_DTYPES])
@given(shape=shapes(), magnitude=st.sampled_from([1e-3, 1.0, 300.0]))
@settings(max_examples=20, deadline=None)
def test_it_writes_what_the_reference_writes(dtype: str, shape: Shape, magnitude: float) -> None:
    storages = [storage_for(shape, dtype) for _ in range(2)]
    states = magnitude * torch.randn(20, shape.num_kv_heads, shape.head_dim)
    rows = chunk(np.arange(1, 21), 0, 20, shape.block_size)
    for backend in (KernelAttention(storages[0], CpuThreads(1)), ReferenceAttention(storages[1])):
        backend.write(0, states, states, rows)
    got, expected = (storage.k[0].view(torch.uint8).int() for storage in storages)
    # float8 is rounded to a half on the way: a tie may go to its other side.
    assert (got - expected).abs().max() <= (1 if dtype == "float8_e4m3fn" else 0)


@pytest.mark.parametrize(("dtype", "limit"), [("int8", 0.01), ("float8_e4m3fn", 0.06)])
@given(shape=shapes())
@settings(max_examples=20, deadline=None)
def test_quantized_cells_stay_within_what_their_rounding_may_change(
    dtype: str, limit: float, shape: Shape
) -> None:
    shape = Shape(shape.head_dim, shape.num_kv_heads, shape.group, 16, AttentionParams(shape.head_dim**-0.5))
    exact, rounded = (
        run_in_chunks(KernelAttention(storage_for(shape, which), CpuThreads(1)), shape, [90], seed=5)
        for which in ("float32", dtype)
    )
    assert 0 < (exact - rounded).abs().mean() < limit * exact.abs().mean() + 0.005


def test_rows_of_a_batch_do_not_see_each_other() -> None:
    shape = Shape(64, 2, 3, 4, AttentionParams(0.25))
    storage = storage_for(shape, "float32")
    backend = KernelAttention(storage, CpuThreads(2))
    tables = np.arange(1, 61).reshape(3, 20)
    alone = []
    parts = []
    for row, (begin, end) in enumerate([(0, 30), (69, 70), (40, 57)]):
        generator = torch.Generator().manual_seed(row)
        key, value = (torch.randn(end, 2, 64, generator=generator) for _ in range(2))
        backend.write(0, key, value, chunk(tables[row], 0, end, 4))
        query = torch.randn(end - begin, 6, 64, generator=generator)
        rows = chunk(tables[row], begin, end, 4)
        parts.append((query, rows))
        alone.append(backend.attend(0, query, rows, shape.params))
    queries = torch.cat([query for query, _ in parts])
    num_queries = np.array([len(query) for query, _ in parts])
    together = Rows(
        query_begin=np.cumsum(num_queries) - num_queries,
        num_queries=num_queries,
        num_context=np.concatenate([rows.num_context for _, rows in parts]),
        block_tables=tables,
        slot_mapping=np.concatenate([rows.slot_mapping for _, rows in parts]),
    )
    assert torch.equal(backend.attend(0, queries, together, shape.params), torch.cat(alone))
