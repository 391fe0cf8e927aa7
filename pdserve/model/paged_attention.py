"""Joins transformers' attention interface to our paged KV. No state: the batch is an argument.

A model loaded with ``attn_implementation=NAME`` passes what it computed for each layer to
the object given as ``paged_batch`` in its call, and no mask is built.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from pdserve.errors import UnsupportedModel
from pdserve.model.attention.base import AttentionParams

NAME = "pdserve_paged"
_HARMLESS_TENSORS = {"position_ids", "cache_position", "position_embeddings"}


class PagedBatch(Protocol):
    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams
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
    params = _params(options, query.shape[-1])
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    output = paged_batch.attend(_layer_index(module), query, key, value, params)
    return output.unsqueeze(0), None


def _layer_index(module: nn.Module) -> int:
    index = module.layer_idx
    assert isinstance(index, int), f"{type(module).__name__} does not know its layer"
    return index


def _params(options: dict[str, Any], head_dim: int) -> AttentionParams:
    """What a layer told the attention interface; ``scaling`` None is the usual 1/√head_dim.

    Raises ``UnsupportedModel`` for a tensor we do not know: it may change the mathematics (attention
    sinks, position biases).
    """
    unknown = [
        name for name, value in options.items() if isinstance(value, Tensor) and name not in _HARMLESS_TENSORS
    ]
    if unknown:
        raise UnsupportedModel(f"attention takes {', '.join(unknown)}, which pdserve does not support")
    scale = options.get("scaling")
    return AttentionParams(
        scale=head_dim**-0.5 if scale is None else scale,
        window=options.get("sliding_window"),
        softcap=options.get("softcap"),
    )


def _no_mask(*args: Any, **kwargs: Any) -> None:
    del args, kwargs
