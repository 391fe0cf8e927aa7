"""Which transforms a loaded model gets, and the check that it still computes the same."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from pdserve.kvcache.storage import KVStorage
from pdserve.model import selfcheck
from pdserve.model.attention.base import AttentionBackend
from pdserve.model.attention.kernel import KernelAttention, supports
from pdserve.model.attention.reference import ReferenceAttention
from pdserve.model.cpu_threads import CpuThreads
from pdserve.model.transforms.embedding import CompactEmbedding
from pdserve.model.transforms.fused_layer import FusedDecoderLayer, can_fuse
from pdserve.model.transforms.packed_linear import PackedLinear
from pdserve.model.vet import LoadedModel

logger = logging.getLogger(__name__)

# Of the probe's logits, relative: what rounding the weights may change.
_TOLERANCE = {"model": 1e-3, "fp32": 1e-3, "fp16": 2e-2, "int8": 0.3}
# What the logits to compare with lost themselves, in the checkpoint's own arithmetic.
_LOST_BEFORE = {torch.float32: 0.0, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@torch.inference_mode()
def apply(loaded: LoadedModel, weight_dtype: str, threads: CpuThreads) -> None:
    """Changes ``loaded.model`` in place, layer by layer: there is never a second copy of all weights.

    ``weight_dtype`` ``model`` leaves transformers' own layers. Whatever the checkpoint's type, arithmetic
    is float32 from here on.
    """
    started_s = time.monotonic()
    layout = loaded.layout(block_size=selfcheck.PROBE_TOKENS, dtype="float32")
    before = selfcheck.paged_logits(loaded.model, layout, ReferenceAttention).float()
    tolerance = _TOLERANCE[weight_dtype] + _LOST_BEFORE[loaded.model.dtype]
    num_fused = num_packed = 0
    if weight_dtype != "model":
        num_fused = _fuse_layers(loaded, weight_dtype, threads)
        num_packed = _pack_linears(loaded.model, weight_dtype, threads)
        _keep_embeddings(loaded.model)
    loaded.model.float()
    after = selfcheck.paged_logits(loaded.model, layout, lambda storage: cpu_attention(storage, threads))
    selfcheck.check_equal(after, before, tolerance=tolerance, what="the transformed model")
    logger.info(
        "transformed weights=%s fused_layers=%d packed_linears=%d seconds=%.1f",
        weight_dtype,
        num_fused,
        num_packed,
        time.monotonic() - started_s,
    )


def cpu_attention(storage: KVStorage, threads: CpuThreads) -> AttentionBackend:
    """The kernels where they can read the pool; the reference for heads that do not fill a vector."""
    return KernelAttention(storage, threads) if supports(storage.layout) else ReferenceAttention(storage)


def _fuse_layers(loaded: LoadedModel, weight_dtype: str, threads: CpuThreads) -> int:
    names = [name for name, module in loaded.model.named_modules() if can_fuse(module)]
    for name in names:
        layer: Any = loaded.model.get_submodule(name)
        params = loaded.attention[layer.self_attn.layer_idx]
        _replace(loaded.model, name, FusedDecoderLayer(layer, params, weight_dtype, threads))
    return len(names)


def _pack_linears(model: PreTrainedModel, weight_dtype: str, threads: CpuThreads) -> int:
    names = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    for name in names:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        _replace(model, name, PackedLinear(linear, weight_dtype, threads))
    return len(names)


def _keep_embeddings(model: PreTrainedModel) -> None:
    names = [name for name, module in model.named_modules() if type(module) is nn.Embedding]
    for name in names:
        embedding = model.get_submodule(name)
        assert isinstance(embedding, nn.Embedding)
        _replace(model, name, CompactEmbedding(embedding))


def _replace(model: PreTrainedModel, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
