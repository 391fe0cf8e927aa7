"""Loads a checkpoint with transformers' own class; refuses what we cannot serve right, with the reason.

Weights keep the type they have in the files, which are mapped: a page is read when it is used, and
belongs to the page cache until it is packed (``transforms``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from pdserve.errors import UnsupportedModel
from pdserve.model.vet import LoadedModel, vet_model

logger = logging.getLogger(__name__)

# Rotary angles of these depend on the length of the whole sequence, so KV computed in one
# chunk would be wrong once the next arrives.
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
# What the CPU kernels can pack.
WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def load_model(path: Path) -> LoadedModel:
    """Raises ``UnsupportedModel`` with the reason."""
    started_s = time.monotonic()
    try:
        _check_config(AutoConfig.from_pretrained(path))
        model = _load_weights(path)
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{path} cannot be loaded: {error}") from error
    loaded = vet_model(model.eval())
    logger.info(
        "model_loaded dtype=%s parameters=%d seconds=%.1f",
        str(model.dtype).removeprefix("torch."),
        model.num_parameters(),
        time.monotonic() - started_s,
    )
    return loaded


def _load_weights(path: Path) -> PreTrainedModel:
    """safetensors alone: other formats may run code."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype="auto", attn_implementation="eager", use_safetensors=True, output_loading_info=True
    )
    model: PreTrainedModel = loaded[0]
    if missing := sorted(loaded[1]["missing_keys"]):
        raise UnsupportedModel(f"{path} lacks weights: {', '.join(missing[:3])} and {len(missing) - 1} more")
    if model.dtype not in WEIGHT_DTYPES:
        raise UnsupportedModel(f"{path} has weights of type {model.dtype}; fp32, fp16 and bf16 are supported")
    return model


def _check_config(config: PretrainedConfig) -> None:
    if config.is_encoder_decoder:
        raise UnsupportedModel(
            f"{config.model_type} is an encoder-decoder; pdserve serves decoder-only models"
        )
    if quantization := getattr(config, "quantization_config", None):
        method = quantization.get("quant_method", "unknown")
        raise UnsupportedModel(
            f"the checkpoint is quantized by {method!r}; only plain fp32, fp16 or bf16 weights are served "
            "(--weight-dtype int8 quantizes them at load)"
        )
    for rope_type in _rope_types(config.get_text_config().to_dict()):
        if rope_type in LENGTH_DEPENDENT_ROPE:
            raise UnsupportedModel(f"rotary embedding {rope_type!r} depends on the sequence length")


def _rope_types(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in ("rope_type", "type") and isinstance(inner, str):
                yield inner
            yield from _rope_types(inner)
