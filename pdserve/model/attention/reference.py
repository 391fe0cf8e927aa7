"""Attention over gathered blocks in plain torch: one sequence at a time, easy to believe."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pdserve.kvcache.storage import KVStorage
from pdserve.model.attention.base import AttentionParams, Rows


class ReferenceAttention:
    def __init__(self, storage: KVStorage) -> None:
        self._storage = storage

    def write(self, layer: int, keys: Tensor, values: Tensor, rows: Rows) -> None:
        self._storage.write(layer, keys, values, torch.from_numpy(rows.slot_mapping))

    def attend(self, layer: int, query: Tensor, rows: Rows, params: AttentionParams) -> Tensor:
        output = torch.empty_like(query)
        for row, num_context in enumerate(rows.num_context.tolist()):
            num_blocks = self._storage.layout.num_blocks_for(num_context)
            table = torch.from_numpy(rows.block_tables[row, :num_blocks]).to(query.device)
            keys, values = (
                states.to(query.dtype) for states in self._storage.gather(layer, table, num_context)
            )
            queries = rows.queries(row)
            output[queries] = attend_row(query[queries], keys, values, params)
        return output


def attend_row(query: Tensor, keys: Tensor, values: Tensor, params: AttentionParams) -> Tensor:
    """``query``: [queries, heads, dim]; ``keys``, ``values``: [kv_heads, context, dim]."""
    if params.softcap is not None:
        return _softcapped(query, keys, values, params)
    num_queries, num_context = query.shape[0], keys.shape[1]
    is_first_chunk = num_queries == num_context and params.window is None
    mask = None if is_first_chunk else _mask(num_queries, num_context, params.window, query.device)
    output = scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        keys.unsqueeze(0),
        values.unsqueeze(0),
        attn_mask=mask,
        is_causal=is_first_chunk and num_queries > 1,
        scale=params.scale,
        enable_gqa=query.shape[1] != keys.shape[0],
    )
    return output[0].transpose(0, 1)


def _mask(num_queries: int, num_context: int, window: int | None, device: torch.device) -> Tensor | None:
    """True where a query may look; None when all may look everywhere."""
    if num_queries == 1 and (window is None or num_context <= window):
        return None
    position = torch.arange(num_context - num_queries, num_context, device=device).unsqueeze(1)
    distance = position - torch.arange(num_context, device=device).unsqueeze(0)
    allowed = distance >= 0
    return allowed if window is None else allowed & (distance < window)


def _softcapped(query: Tensor, keys: Tensor, values: Tensor, params: AttentionParams) -> Tensor:
    """Logits squashed to ±softcap before the softmax (Gemma 2, arXiv 2408.00118, section 2)."""
    assert params.softcap is not None
    group = query.shape[1] // keys.shape[0]
    keys, values = (states.repeat_interleave(group, dim=0) for states in (keys, values))
    scores = query.transpose(0, 1) @ keys.transpose(1, 2) * params.scale
    scores = params.softcap * torch.tanh(scores / params.softcap)
    mask = _mask(query.shape[0], keys.shape[1], params.window, query.device)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return (scores.float().softmax(dim=-1).to(values.dtype) @ values).transpose(0, 1)
