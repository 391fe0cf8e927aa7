"""What a model must be for us to serve it, found out by running it.

A probe records what reaches attention; then the same prompt through the model's own attention and
through ours must agree.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pdserve.errors import UnsupportedModel
from pdserve.kvcache.layout import KVLayout, PoolOrder
from pdserve.model import paged_attention, selfcheck
from pdserve.model.attention.base import AttentionParams
from pdserve.model.attention.reference import ReferenceAttention
from pdserve.model.fingerprint import fingerprint

# Of the probe's logits, relative: what another order of additions may change.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """``attention``: what each layer asks of it. ``fingerprint``: equal for two workers exactly when
    they may exchange KV."""

    model: PreTrainedModel
    attention: tuple[AttentionParams, ...]
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: frozenset[int]
    fingerprint: str

    def layout(self, *, block_size: int, dtype: str, order: PoolOrder = PoolOrder.HEAD_MAJOR) -> KVLayout:
        return KVLayout(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=dtype,
            block_size=block_size,
            order=order,
        )


@torch.inference_mode()
def vet_model(model: PreTrainedModel) -> LoadedModel:
    """For a model already in memory; switches its attention to ours."""
    paged_attention.register()
    config = model.config.get_text_config()
    own_logits = model(input_ids=selfcheck.probe_token_ids(model), use_cache=False).logits
    model.set_attn_implementation(paged_attention.NAME)
    probe = _probe(model)
    num_layers, num_kv_heads, head_dim = probe.geometry(config.num_hidden_layers)
    loaded = LoadedModel(
        model=model,
        attention=tuple(probe.params[layer] for layer in range(num_layers)),
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=config.vocab_size,
        max_context_tokens=config.max_position_embeddings,
        eos_token_ids=_eos_token_ids(model),
        fingerprint=fingerprint(model),
    )
    layout = loaded.layout(
        block_size=selfcheck.PROBE_TOKENS, dtype=str(loaded.model.dtype).removeprefix("torch.")
    )
    selfcheck.check_equal(
        selfcheck.paged_logits(model, layout, ReferenceAttention),
        own_logits,
        tolerance=_TOLERANCE[model.dtype],
        what=f"paged attention in {type(model).__name__} does something we do not know and",
    )
    return loaded


class _Probe:
    """A batch that only records what reaches attention."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, int]] = []
        self.params: dict[int, AttentionParams] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams
    ) -> Tensor:
        if key.shape != value.shape:
            raise UnsupportedModel(f"keys {tuple(key.shape)} and values {tuple(value.shape)} differ in shape")
        self.shapes.append((key.shape[1], key.shape[2]))
        self.params[layer] = params
        return torch.zeros_like(query)

    def geometry(self, num_layers: int) -> tuple[int, int, int]:
        if sorted(self.params) != list(range(num_layers)) or len(self.shapes) != num_layers:
            raise UnsupportedModel(
                f"attention ran {len(self.shapes)} times, in layers {sorted(self.params)} of {num_layers}: "
                "layers that keep other state (recurrent, cross-attention, shared KV) are not supported"
            )
        if len(set(self.shapes)) != 1:
            raise UnsupportedModel(f"layers differ in KV heads and head size: {sorted(set(self.shapes))}")
        return num_layers, *self.shapes[0]


def _probe(model: PreTrainedModel) -> _Probe:
    probe = _Probe()
    try:
        selfcheck.run_probe(model, probe)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise UnsupportedModel(
            f"{type(model).__name__} does not go through transformers' attention interface: {error}"
        ) from error
    return probe


def _eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    eos = model.generation_config.eos_token_id
    if eos is None:
        eos = model.config.get_text_config().eos_token_id
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)
