"""A decoder layer as ten kernel calls, in place of some forty tensor operations.

For layers of the Llama pattern: norm, attention with rotary embedding, residual, norm, gated SiLU,
residual. transformers' own forward costs more around the matrix products than in them at decode's batch
sizes. What attention gets told (scale, window) is what the layer told it when it was vetted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from pdserve.kernels.elementwise import add, rms_norm, rms_norm_heads, rotate, silu_mul
from pdserve.kernels.lanes import LANES
from pdserve.model.attention.base import AttentionParams
from pdserve.model.cpu_threads import CpuThreads
from pdserve.model.paged_attention import PagedBatch
from pdserve.model.transforms.packed_linear import PackedWeights

Floats = NDArray[np.float32]
FUSABLE = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)


def can_fuse(layer: Any) -> bool:
    if type(layer) not in FUSABLE:
        return False
    features = (layer.self_attn.head_dim, layer.mlp.down_proj.in_features)
    return isinstance(layer.mlp.act_fn, nn.SiLU | SiLUActivation) and all(
        size % LANES == 0 for size in features
    )


class FusedDecoderLayer(nn.Module):
    def __init__(self, layer: Any, params: AttentionParams, weight_dtype: str, threads: CpuThreads) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self._layer = attention.layer_idx
        self._params = params
        self._head_dim = attention.head_dim
        self._num_heads = attention.q_proj.out_features // self._head_dim
        self._num_kv_heads = attention.k_proj.out_features // self._head_dim
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self._qkv = PackedWeights(projections, weight_dtype, threads)
        self._output = PackedWeights([attention.o_proj], weight_dtype, threads)
        self._gate_up = PackedWeights([mlp.gate_proj, mlp.up_proj], weight_dtype, threads)
        self._down = PackedWeights([mlp.down_proj], weight_dtype, threads)
        self._input_norm = _Norm(layer.input_layernorm)
        self._mlp_norm = _Norm(layer.post_attention_layernorm)
        has_head_norms = isinstance(layer, Qwen3DecoderLayer)
        self._q_norm = _Norm(attention.q_norm) if has_head_norms else None
        self._k_norm = _Norm(attention.k_norm) if has_head_norms else None

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        paged_batch: PagedBatch,
        **unused: Any,
    ) -> Tensor:
        """``hidden_states``: [1, tokens, features], float32; changed in place and returned."""
        hidden: Floats = hidden_states[0].numpy()
        add(hidden, self._attention(self._input_norm(hidden), position_embeddings, paged_batch))
        add(hidden, self._mlp(self._mlp_norm(hidden)))
        return hidden_states

    def _attention(
        self, normed: Floats, position_embeddings: tuple[Tensor, Tensor], paged_batch: PagedBatch
    ) -> Floats:
        cos, sin = (table[0].numpy() for table in position_embeddings)
        qkv = self._qkv.multiply(normed).reshape(len(normed), -1, self._head_dim)
        num_rotated = self._num_heads + self._num_kv_heads
        if self._q_norm is not None and self._k_norm is not None:
            self._q_norm.heads(qkv[:, : self._num_heads])
            self._k_norm.heads(qkv[:, self._num_heads : num_rotated])
        rotate(qkv[:, :num_rotated], cos, sin)
        heads = torch.from_numpy(qkv)
        query, key, value = heads.split([self._num_heads, self._num_kv_heads, self._num_kv_heads], dim=1)
        output = paged_batch.attend(self._layer, query, key, value, self._params)
        return self._output.multiply(output.reshape(len(normed), -1).numpy())

    def _mlp(self, normed: Floats) -> Floats:
        gate_up = self._gate_up.multiply(normed)
        activated = np.empty((len(normed), self._down.in_features), np.float32)
        silu_mul(gate_up, activated)
        return self._down.multiply(activated)


class _Norm:
    def __init__(self, norm: Any) -> None:
        self._weight: Floats = norm.weight.detach().float().numpy()
        self._epsilon = float(norm.variance_epsilon)

    def __call__(self, x: Floats) -> Floats:
        out = np.empty_like(x)
        rms_norm(x, self._weight, self._epsilon, out)
        return out

    def heads(self, x: Floats) -> None:
        """In place. ``x``: [tokens, heads, head_dim], one norm a head."""
        rms_norm_heads(x, self._weight, self._epsilon)
