"""How far the next-token distributions of two ways to keep or move KV are apart, on real text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from pdserve.engine.batch import PackedBatch
from pdserve.engine.build import BuiltEngine, assemble
from pdserve.engine.config import EngineConfig, KVCacheDtype
from pdserve.engine.scheduler import Chunk, StepPlan
from pdserve.engine.sequence import Sequence
from pdserve.model.attention.kernel import KernelAttention
from pdserve.model.cpu_threads import CpuThreads
from pdserve.model.embedded import embedded_model_path
from pdserve.model.loader import load_model
from pdserve.sampling import SamplingParams

ROOT = Path(__file__).parents[1]
TEXT = ("LICENSE", "README.md", "docs/architecture.md", "docs/protocol.md")
WINDOW_TOKENS, CHUNK_TOKENS = 1024, 128


def windows(count: int) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(embedded_model_path() / "tokenizer.json"))
    text = "\n".join((ROOT / name).read_text() for name in TEXT)
    token_ids: list[int] = tokenizer.encode(text).ids
    cut = [token_ids[begin : begin + WINDOW_TOKENS] for begin in range(0, len(token_ids), WINDOW_TOKENS)]
    return [window for window in cut if len(window) == WINDOW_TOKENS][:count]


def built(kv_dtype: KVCacheDtype) -> BuiltEngine:
    config = EngineConfig(kv_cache_bytes=128 << 20, kv_cache_dtype=kv_dtype, weight_dtype="fp32")
    return assemble(load_model(embedded_model_path()), config)


def log_probabilities(engine: BuiltEngine, token_ids: list[int], begin: int = 0) -> Tensor:
    """[tokens from ``begin`` on, vocabulary], each reading the KV of those before it out of the pool.

    It lies in ``blocks_of`` the text, also of the tokens before ``begin``.
    """
    layout = engine.storage.layout
    table = blocks_of(engine, token_ids)
    sequence = Sequence("text", token_ids, SamplingParams(max_tokens=1), block_table=table)
    backend = KernelAttention(engine.storage, CpuThreads(1))
    logits = []
    for chunk in _chunks(sequence, begin):
        batch = PackedBatch(
            StepPlan((chunk,)),
            block_size=layout.block_size,
            backend=backend,
            on_boundary=lambda: None,
            on_layer_written=lambda layer: None,
        )
        output = engine.loaded.model(
            input_ids=batch.token_ids, position_ids=batch.positions, use_cache=False, paged_batch=batch
        )
        logits.append(output.logits[0].float())
    return torch.cat(logits).log_softmax(-1)


def blocks_of(engine: BuiltEngine, token_ids: list[int]) -> list[int]:
    return list(range(1, engine.storage.layout.num_blocks_for(len(token_ids)) + 1))


def divergence(exact: Tensor, other: Tensor) -> Tensor:
    """KL(exact ‖ other) in nats, per position."""
    return (exact.exp() * (exact - other)).sum(-1)


def _chunks(sequence: Sequence, begin: int) -> Iterator[Chunk]:
    for chunk_begin in range(begin, sequence.num_tokens, CHUNK_TOKENS):
        yield Chunk(sequence, chunk_begin, CHUNK_TOKENS)
