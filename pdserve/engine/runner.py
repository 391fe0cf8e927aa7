"""Executes a plan on the model. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from pdserve.engine.batch import PackedBatch
from pdserve.engine.sampler import SampledToken, Sampler
from pdserve.engine.scheduler import StepPlan
from pdserve.model.attention.base import AttentionBackend
from pdserve.model.vet import LoadedModel


class StepAbandoned(Exception):
    """Every sequence of the step was aborted; raised at a layer boundary to save the rest of it."""


class Runner(Protocol):
    """What the engine needs; tests have one that runs a script instead of a model."""

    def execute(
        self, plan: StepPlan, *, on_boundary: Callable[[], None], on_layer_written: Callable[[int], None]
    ) -> list[SampledToken]:
        """One token per chunk that samples, in order. ``on_boundary`` runs before each layer's
        attention, ``on_layer_written`` when the layer's KV of this step is in the pool."""

    def detach(self, seq_id: str) -> None:
        """During ``execute``: the sequence's blocks are left alone from the next layer on."""


class ModelRunner:
    def __init__(
        self, loaded: LoadedModel, *, block_size: int, backend: AttentionBackend, sampler: Sampler
    ) -> None:
        self._model = loaded.model
        self._device = loaded.model.device
        self._block_size = block_size
        self._backend = backend
        self._sampler = sampler
        self._batch: PackedBatch | None = None

    @torch.inference_mode()
    def execute(
        self, plan: StepPlan, *, on_boundary: Callable[[], None], on_layer_written: Callable[[int], None]
    ) -> list[SampledToken]:
        batch = self._batch = PackedBatch(
            plan,
            block_size=self._block_size,
            backend=self._backend,
            on_boundary=on_boundary,
            on_layer_written=on_layer_written,
        )
        logits = self._model(
            input_ids=batch.token_ids.to(self._device),
            position_ids=batch.positions.to(self._device),
            use_cache=False,
            logits_to_keep=batch.last_tokens.to(self._device),
            paged_batch=batch,
        ).logits[0]
        self._batch = None
        sequences = [chunk.sequence for chunk in plan.chunks if chunk.samples]
        return self._sampler.sample(logits.float().cpu(), sequences) if sequences else []

    def detach(self, seq_id: str) -> None:
        if self._batch is not None:
            self._batch.detach(seq_id)
