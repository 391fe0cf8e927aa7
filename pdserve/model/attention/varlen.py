"""Attention on a GPU through torch's own kernel over paged KV. **Never run on a GPU yet.**

``torch.nn.attention.varlen`` reads the pool in place by block tables. One split of the keys and values for
every sequence, so that a result does not depend on what else is in the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.kvcache.layout import PoolOrder
from pdserve.kvcache.storage import KVStorage
from pdserve.model.attention.base import AttentionParams, Rows
from pdserve.model.attention.reference import ReferenceAttention

# ``torch.nn.attention.varlen.varlen_attn`` without its options that return more.
PagedVarlen = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class _DeviceRows:
    """``Rows`` on the device, as the kernel wants them; ``source`` and ``slots``: what they were made of."""

    source: Rows
    slots: NDArray[np.int64]
    query_bounds: Tensor  # [rows + 1], int32
    num_context: Tensor  # [rows], int32
    block_tables: Tensor  # [rows, most blocks], int32
    most_queries: int
    most_context: int

    def is_of(self, rows: Rows) -> bool:
        """A sequence that is detached in mid-step changes its slots in place."""
        return rows is self.source and np.array_equal(rows.slot_mapping, self.slots)


class VarlenAttention:
    def __init__(self, storage: KVStorage, attend: PagedVarlen) -> None:
        assert storage.layout.order is PoolOrder.TOKEN_MAJOR, storage.layout
        self._storage = storage
        self._attend = attend
        self._reference = ReferenceAttention(storage)
        self._rows: _DeviceRows | None = None

    def write(self, layer: int, keys: Tensor, values: Tensor, rows: Rows) -> None:
        self._reference.write(layer, keys, values, rows)

    def attend(self, layer: int, query: Tensor, rows: Rows, params: AttentionParams) -> Tensor:
        if params.softcap is not None:  # the kernel has none
            return self._reference.attend(layer, query, rows, params)
        placed = self._placed(rows)
        return self._attend(
            query,
            self._storage.k[layer],
            self._storage.v[layer],
            placed.query_bounds,
            None,
            placed.most_queries,
            placed.most_context,
            scale=params.scale,
            window_size=(-1 if params.window is None else params.window - 1, 0),
            enable_gqa=query.shape[1] != self._storage.layout.num_kv_heads,
            seqused_k=placed.num_context,
            block_table=placed.block_tables,
            num_splits=1,
        )

    def _placed(self, rows: Rows) -> _DeviceRows:
        """Copied once a step, not once a layer."""
        if self._rows is None or not self._rows.is_of(rows):
            self._rows = self._place(rows)
        return self._rows

    def _place(self, rows: Rows) -> _DeviceRows:
        bounds = np.append(rows.query_begin, rows.query_begin[-1] + rows.num_queries[-1])
        return _DeviceRows(
            source=rows,
            slots=rows.slot_mapping.copy(),
            query_bounds=self._on_device(bounds),
            num_context=self._on_device(rows.num_context),
            block_tables=self._on_device(rows.block_tables),
            most_queries=int(rows.num_queries.max()),
            most_context=int(rows.num_context.max()),
        )

    def _on_device(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array.astype(np.int32)).to(self._storage.device)
