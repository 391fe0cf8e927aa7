"""What an attention backend gets and returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rows:
    """The sequences of a packed batch, one row each.

    A row's queries are the last ``num_queries`` of its ``num_context`` tokens, whose KV is in the blocks of
    ``block_tables[row]``; rows are padded with the null block.
    """

    query_begin: Ints  # [rows], index of the first query in the batch
    num_queries: Ints  # [rows]
    num_context: Ints  # [rows]
    block_tables: Ints  # [rows, most blocks]
    slot_mapping: Ints  # [tokens], each block * block_size + offset: where its KV goes

    def queries(self, row: int) -> slice:
        begin = int(self.query_begin[row])
        return slice(begin, begin + int(self.num_queries[row]))


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """``window``: a query sees that many tokens, itself included; None is all. ``softcap``: Gemma 2's."""

    scale: float
    window: int | None = None
    softcap: float | None = None


class AttentionBackend(Protocol):
    """Made for one storage."""

    def write(self, layer: int, keys: Tensor, values: Tensor, rows: Rows) -> None:
        """``keys``, ``values``: [tokens, kv_heads, head_dim]."""

    def attend(self, layer: int, query: Tensor, rows: Rows, params: AttentionParams) -> Tensor:
        """``query``: [tokens, heads, head_dim]; returns the same shape. Reads what ``write`` wrote."""
