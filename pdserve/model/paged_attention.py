"""Joins transformers' attention interface to our paged KV. No state: the batch is an argument.

A model loaded with ``attn_implementation=NAME`` passes what it computed for each layer to
the object given as ``paged_batch`` in its call, and no mask is built.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "pdserve_paged"


class PagedBatch(Protocol):
    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
    ) -> Tensor:
        """``query``: [tokens, heads, head_dim], ``key``, ``value``: [tokens, kv_heads, head_dim],
        all tokens of the packed batch. Returns [tokens, heads, head_dim]."""


def register() -> None:
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _no_mask)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    paged_batch: PagedBatch,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers gives [1, heads, tokens, head_dim] and wants [1, tokens, heads, head_dim] back."""
    del attention_mask
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    output = paged_batch.attend(module, query, key, value, options)
    return output.unsqueeze(0), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    del args, kwargs
