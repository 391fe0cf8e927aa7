"""What an attention backend gets and returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pdserve.kvcache.storage import KVStorage


@dataclass(slots=True)
class Row:
    """One sequence's part of a packed batch.

    Its queries are the last ``num_queries`` of ``num_context`` tokens, whose KV is in the
    blocks of ``block_table`` (int64, at least as long as needed).
    """

    query_begin: int
    num_queries: int
    num_context: int
    block_table: Tensor

    @property
    def queries(self) -> slice:
        return slice(self.query_begin, self.query_begin + self.num_queries)


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """``window``: a query sees that many tokens, itself included; None is all. ``softcap``: Gemma 2's."""

    scale: float
    window: int | None = None
    softcap: float | None = None


class AttentionBackend(Protocol):
    def attend(
        self, query: Tensor, rows: Sequence[Row], storage: KVStorage, layer: int, params: AttentionParams
    ) -> Tensor:
        """``query``: [tokens, heads, head_dim]; returns the same shape."""
