"""An embedding that stays as the checkpoint has it: rows become float32 when they are looked up."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import embedding


class CompactEmbedding(nn.Module):
    """The table is not in ``parameters()``: a model turned to float32 would double it."""

    def __init__(self, original: nn.Embedding) -> None:
        super().__init__()
        # A copy: a view would keep all mapped weights in memory.
        self._table = [original.weight.detach().clone()]

    def forward(self, token_ids: Tensor) -> Tensor:
        return embedding(token_ids, self._table[0]).float()
