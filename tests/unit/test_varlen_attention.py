"""What a GPU's kernel is given, checked with a plain one that has its interface."""

import numpy as np
import pytest
import torch
from torch import Tensor

from pdserve.kvcache.layout import KVLayout, PoolOrder
from pdserve.kvcache.storage import KVStorage
from pdserve.model.attention.base import AttentionParams, Rows
from pdserve.model.attention.reference import ReferenceAttention
from pdserve.model.attention.varlen import VarlenAttention
from tests.support.plain_varlen import plain_varlen

LAYOUT = KVLayout(1, 2, 8, "float32", 4, PoolOrder.TOKEN_MAJOR)
ROWS = Rows(
    query_begin=np.array([0, 3, 4]),
    num_queries=np.array([3, 1, 6]),
    num_context=np.array([9, 12, 6]),
    block_tables=np.array([[5, 2, 9], [7, 1, 3], [4, 8, 0]]),
    slot_mapping=np.array([2 * 4 + 2, 2 * 4 + 3, 9 * 4, 3 * 4 + 3, 16, 17, 18, 19, 32, 33]),
)


def filled_storage() -> KVStorage:
    storage = KVStorage(LAYOUT, num_blocks=12)
    for pool in (*storage.k, *storage.v):
        pool.copy_(torch.randn(pool.shape))
    return storage


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_it_agrees_with_the_reference(window: int | None, softcap: float | None) -> None:
    storage = filled_storage()
    params = AttentionParams(scale=0.3, window=window, softcap=softcap)
    query = torch.randn(10, 6, 8)
    keys, values = torch.randn(2, 10, 2, 8)
    subject = VarlenAttention(storage, plain_varlen)
    subject.write(0, keys, values, ROWS)
    expected = ReferenceAttention(storage).attend(0, query, ROWS, params)
    torch.testing.assert_close(subject.attend(0, query, ROWS, params), expected)


def test_rows_are_copied_to_the_device_once_a_step() -> None:
    tables: list[Tensor] = []

    def noting(*args: Tensor, **options: Tensor) -> Tensor:
        tables.append(options["block_table"])
        return args[0]

    subject = VarlenAttention(filled_storage(), noting)
    query = torch.randn(10, 6, 8)
    for _ in range(3):
        subject.attend(0, query, ROWS, AttentionParams(scale=1.0))
    assert tables[0] is tables[1] is tables[2]


def test_a_sequence_that_is_detached_in_mid_step_is_detached_on_the_device() -> None:
    rows = Rows(
        ROWS.query_begin,
        ROWS.num_queries,
        ROWS.num_context,
        ROWS.block_tables.copy(),
        ROWS.slot_mapping.copy(),
    )
    seen: list[Tensor] = []

    def noting(*args: Tensor, **options: Tensor) -> Tensor:
        seen.append(options["block_table"])
        return args[0]

    subject = VarlenAttention(filled_storage(), noting)
    subject.attend(0, torch.randn(10, 6, 8), rows, AttentionParams(scale=1.0))
    rows.slot_mapping[rows.queries(1)] = 0
    rows.block_tables[1] = 0
    subject.attend(0, torch.randn(10, 6, 8), rows, AttentionParams(scale=1.0))
    assert seen[0][1].tolist() == [7, 1, 3]
    assert seen[1][1].tolist() == [0, 0, 0]
