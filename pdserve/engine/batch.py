"""A plan as arrays: the packed tokens of all its chunks, and where their KV goes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from pdserve.engine.scheduler import StepPlan
from pdserve.kvcache.block_pool import NULL_BLOCK
from pdserve.model.attention.base import AttentionBackend, AttentionParams, Rows


class PackedBatch:
    """Implements ``paged_attention.PagedBatch``: write the new KV, tell who listens, attend."""

    def __init__(
        self,
        plan: StepPlan,
        *,
        block_size: int,
        backend: AttentionBackend,
        on_boundary: Callable[[], None],
        on_layer_written: Callable[[int], None],
    ) -> None:
        self._backend = backend
        self._on_boundary = on_boundary
        self._on_layer_written = on_layer_written
        self._row_of = {chunk.sequence.seq_id: row for row, chunk in enumerate(plan.chunks)}
        self._rows = _rows(plan, block_size)
        token_ids: list[int] = []
        positions: list[int] = []
        last_tokens: list[int] = []
        for chunk in plan.chunks:
            token_ids += chunk.sequence.tokens_between(chunk.begin, chunk.end)
            positions += range(chunk.begin, chunk.end)
            if chunk.samples:
                last_tokens.append(len(token_ids) - 1)
        self.token_ids = torch.tensor([token_ids])
        self.positions = torch.tensor([positions])
        self.last_tokens = torch.tensor(last_tokens, dtype=torch.int64)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams
    ) -> Tensor:
        self._on_boundary()
        self._backend.write(layer, key, value, self._rows)
        self._on_layer_written(layer)
        return self._backend.attend(layer, query, self._rows, params)

    def detach(self, seq_id: str) -> None:
        """From the next layer on, this sequence touches only the null block: its own can be reused."""
        row = self._row_of.get(seq_id)
        if row is not None:
            self._rows.slot_mapping[self._rows.queries(row)] = NULL_BLOCK
            self._rows.block_tables[row] = NULL_BLOCK


def _rows(plan: StepPlan, block_size: int) -> Rows:
    num_queries = np.array([chunk.num_tokens for chunk in plan.chunks])
    tables = [chunk.sequence.block_table for chunk in plan.chunks]
    block_tables = np.full((len(tables), max(map(len, tables))), NULL_BLOCK, np.int64)
    slots = []
    for row, (chunk, table) in enumerate(zip(plan.chunks, tables, strict=True)):
        block_tables[row, : len(table)] = table
        positions = np.arange(chunk.begin, chunk.end)
        slots.append(block_tables[row, positions // block_size] * block_size + positions % block_size)
    return Rows(
        query_begin=np.cumsum(num_queries) - num_queries,
        num_queries=num_queries,
        num_context=np.array([chunk.end for chunk in plan.chunks]),
        block_tables=block_tables,
        slot_mapping=np.concatenate(slots),
    )
