"""The handful of numbers that shape an engine. No torch: settings are read before it is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WeightDtype = Literal["model", "fp32", "fp16", "int8"]
KVCacheDtype = Literal["auto", "fp32", "fp16", "bf16", "int8", "fp8"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """``num_blocks`` wins over ``kv_cache_bytes``; ``max_context_tokens`` None is the model's.

    ``device``: ``cpu``, ``cuda`` or ``cuda:N``. ``weight_dtype``: what the weights are packed as for the CPU
    kernels; ``model`` leaves the model as it was loaded. ``kv_cache_dtype``: ``auto`` is what the model
    computes in, so that nothing is rounded. ``shares_kv``: decode workers of this host may read
    the pool, where it is on a CPU.
    """

    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_bytes: int = 1 << 30
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    prefill_chunk_tokens: int = 128
    max_context_tokens: int | None = None
    enable_prefix_cache: bool = True
    shares_kv: bool = False
    num_threads: int = 1
    device: str = "cpu"
    weight_dtype: WeightDtype = "fp16"
    kv_cache_dtype: KVCacheDtype = "auto"
