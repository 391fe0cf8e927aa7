"""Puts an engine together from a model folder and a handful of numbers."""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from pdserve.engine.config import EngineConfig, KVCacheDtype
from pdserve.engine.engine import Engine
from pdserve.engine.runner import ModelRunner
from pdserve.engine.sampler import Sampler
from pdserve.engine.scheduler import Scheduler, SchedulerLimits
from pdserve.engine.warm_up import warm_up
from pdserve.errors import ConfigError
from pdserve.kvcache import pieces
from pdserve.kvcache.block_pool import BlockPool
from pdserve.kvcache.layout import KVLayout
from pdserve.kvcache.storage import KVStorage
from pdserve.model import gpu
from pdserve.model.attention.base import AttentionBackend
from pdserve.model.attention.reference import ReferenceAttention
from pdserve.model.cpu_threads import CpuThreads
from pdserve.model.loader import load_model
from pdserve.model.transforms.apply import apply, cpu_attention
from pdserve.model.vet import LoadedModel

logger = logging.getLogger(__name__)

# Models compute in float32 on a CPU, so that is "auto".
_KV_DTYPES: dict[KVCacheDtype, str] = {
    "auto": "float32",
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "int8": "int8",
    "fp8": "float8_e4m3fn",
}
_SHORT_NAMES = {dtype: name for name, dtype in _KV_DTYPES.items() if name != "auto"}


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    engine: Engine
    loaded: LoadedModel
    storage: KVStorage
    num_blocks: int
    max_context_tokens: int


def build_engine(model_path: Path, config: EngineConfig) -> BuiltEngine:
    """Loads the model. Raises ``UnsupportedModel`` or ``ConfigError``."""
    torch.set_num_threads(config.num_threads)
    return assemble(load_model(model_path), config)


def assemble(loaded: LoadedModel, config: EngineConfig) -> BuiltEngine:
    """Takes the model over: its layers are replaced by faster ones, or it moves to a GPU."""
    layout, make_backend = _prepare(loaded, config)
    num_blocks = config.num_blocks or config.kv_cache_bytes // layout.block_bytes
    if num_blocks < 2:
        raise ConfigError(
            f"a KV cache of {config.kv_cache_bytes} bytes holds {num_blocks} blocks of "
            f"{layout.block_bytes} bytes; at least 2 are needed"
        )
    max_context_tokens = min(
        config.max_context_tokens or loaded.max_context_tokens,
        loaded.max_context_tokens,
        (num_blocks - 1) * config.block_size,
    )
    limits = SchedulerLimits(
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        prefill_chunk_tokens=config.prefill_chunk_tokens,
        max_context_tokens=max_context_tokens,
        enable_prefix_cache=config.enable_prefix_cache,
    )
    pool = BlockPool(num_blocks)
    is_shared = config.shares_kv and config.device == "cpu"
    storage = KVStorage(layout, num_blocks=num_blocks, device=config.device, is_shared=is_shared)
    runner = ModelRunner(
        loaded,
        block_size=config.block_size,
        backend=make_backend(storage),
        sampler=Sampler(loaded.eos_token_ids),
    )
    warm_up(runner, layout)
    pieces.warm_up()
    engine = Engine(
        scheduler=Scheduler(pool, limits),
        pool=pool,
        runner=runner,
        vocab_size=loaded.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        max_context_tokens=max_context_tokens,
    )
    logger.info(
        "engine_ready kv_dtype=%s num_blocks=%d block_size=%d kv_cache_mb=%d max_context_tokens=%d "
        "peak_memory_mb=%d",
        layout.dtype,
        num_blocks,
        config.block_size,
        num_blocks * layout.block_bytes >> 20,
        max_context_tokens,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,  # Linux counts in KiB
    )
    return BuiltEngine(engine, loaded, storage, num_blocks, max_context_tokens)


def _prepare(
    loaded: LoadedModel, config: EngineConfig
) -> tuple[KVLayout, Callable[[KVStorage], AttentionBackend]]:
    """The model made ready on its device, and what its KV pool looks like there."""
    if config.device == "cpu":
        threads = CpuThreads(config.num_threads)
        apply(loaded, config.weight_dtype, threads)
        dtype = _KV_DTYPES[config.kv_cache_dtype]
        layout = loaded.layout(block_size=config.block_size, dtype=dtype)
        return layout, partial(cpu_attention, threads=threads)
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    if config.kv_cache_dtype not in ("auto", _SHORT_NAMES.get(dtype)):
        raise ConfigError(
            f"--kv-cache-dtype {config.kv_cache_dtype}: on a GPU KV has the model's type, {dtype}"
        )
    layout = loaded.layout(block_size=config.block_size, dtype=dtype, order=gpu.GPU_ORDER)
    is_fast = gpu.move(loaded, config.device, layout)
    return layout, gpu.varlen_attention if is_fast else ReferenceAttention
