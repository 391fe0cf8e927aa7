"""A plan as tensors: the packed tokens of all its chunks, and where their KV goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pdserve.engine.scheduler import StepPlan
from pdserve.kvcache.block_pool import NULL_BLOCK
from pdserve.kvcache.storage import KVStorage
from pdserve.model.attention.base import AttentionBackend, Row
from pdserve.model.loader import attention_params, layer_index


class PackedBatch:
    """Implements ``paged_attention.PagedBatch``: write the new KV, tell who listens, attend."""

    def __init__(
        self,
        plan: StepPlan,
        *,
        storage: KVStorage,
        backend: AttentionBackend,
        on_boundary: Callable[[], None],
        on_layer_written: Callable[[int], None],
    ) -> None:
        self._storage = storage
        self._backend = backend
        self._on_boundary = on_boundary
        self._on_layer_written = on_layer_written
        self._row_of: dict[str, Row] = {}
        block_size = storage.layout.block_size
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        last_tokens: list[int] = []
        for chunk in plan.chunks:
            sequence = chunk.sequence
            table = sequence.block_table
            self._row_of[sequence.seq_id] = Row(
                len(token_ids), chunk.num_tokens, chunk.end, torch.tensor(table, dtype=torch.int64)
            )
            token_ids += sequence.tokens_between(chunk.begin, chunk.end)
            positions += range(chunk.begin, chunk.end)
            slots += [
                table[position // block_size] * block_size + position % block_size
                for position in range(chunk.begin, chunk.end)
            ]
            if chunk.samples:
                last_tokens.append(len(token_ids) - 1)
        self._rows = list(self._row_of.values())
        self._slots = torch.tensor(slots, dtype=torch.int64)
        self.token_ids = torch.tensor([token_ids])
        self.positions = torch.tensor([positions])
        self.last_tokens = torch.tensor(last_tokens, dtype=torch.int64)

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
    ) -> Tensor:
        self._on_boundary()
        layer = layer_index(module)
        self._storage.write(layer, key, value, self._slots)
        self._on_layer_written(layer)
        params = attention_params(options, query.shape[-1])
        return self._backend.attend(query, self._rows, self._storage, layer, params)

    def detach(self, seq_id: str) -> None:
        """From the next layer on, this sequence touches only the null block: its own can be reused."""
        row = self._row_of.get(seq_id)
        if row is not None:
            self._slots[row.queries] = NULL_BLOCK
            row.block_table.fill_(NULL_BLOCK)
