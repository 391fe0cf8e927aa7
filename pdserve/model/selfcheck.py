"""The model's logits on a short prompt, through a paged batch: what start-up checks compare."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pdserve.errors import UnsupportedModel
from pdserve.kvcache.layout import KVLayout
from pdserve.kvcache.storage import KVStorage
from pdserve.model.attention.base import AttentionBackend, AttentionParams, Rows
from pdserve.model.paged_attention import PagedBatch

PROBE_TOKENS = 5


class _ProbeBatch:
    """The probe prompt in a pool of its own."""

    def __init__(self, backend: AttentionBackend, num_blocks: int) -> None:
        self._backend = backend
        one = np.ones(1, np.int64)
        self._rows = Rows(
            query_begin=0 * one,
            num_queries=PROBE_TOKENS * one,
            num_context=PROBE_TOKENS * one,
            block_tables=np.arange(num_blocks).reshape(1, -1),
            slot_mapping=np.arange(PROBE_TOKENS),
        )

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams
    ) -> Tensor:
        self._backend.write(layer, key, value, self._rows)
        return self._backend.attend(layer, query, self._rows, params)


def probe_token_ids(model: PreTrainedModel) -> Tensor:
    vocab_size: int = model.config.get_text_config().vocab_size
    return torch.arange(PROBE_TOKENS, device=model.device).unsqueeze(0) % vocab_size


def run_probe(model: PreTrainedModel, batch: PagedBatch) -> Tensor:
    logits: Tensor = model(
        input_ids=probe_token_ids(model),
        position_ids=torch.arange(PROBE_TOKENS, device=model.device).unsqueeze(0),
        use_cache=False,
        paged_batch=batch,
    ).logits
    return logits


def paged_logits(
    model: PreTrainedModel, layout: KVLayout, make_backend: Callable[[KVStorage], AttentionBackend]
) -> Tensor:
    num_blocks = layout.num_blocks_for(PROBE_TOKENS)
    storage = KVStorage(layout, num_blocks=num_blocks, device=str(model.device))
    return run_probe(model, _ProbeBatch(make_backend(storage), num_blocks))


def check_equal(logits: Tensor, expected: Tensor, *, tolerance: float, what: str) -> None:
    """``tolerance``: of the largest difference, as a share of the largest logit.

    Raises ``UnsupportedModel``.
    """
    difference = (logits - expected).abs().max() / expected.abs().max().clamp(min=1e-6)
    if not difference <= tolerance:
        raise UnsupportedModel(f"{what} gives other logits (relative difference {difference:.2g})")
