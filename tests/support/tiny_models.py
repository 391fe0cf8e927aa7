"""Tiny random models of the architectures we promise, each with something of its own in attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCAB_SIZE = 211
EOS_TOKEN_ID = 2

# Wide weights: with the usual 0.02 a random model repeats one token and proves little.
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "initializer_range": 0.35,
    "eos_token_id": EOS_TOKEN_ID,
    "bos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**COMMON),
    "qwen2": lambda: Qwen2Config(**COMMON),
    "qwen3": lambda: Qwen3Config(**COMMON, head_dim=16),
    "mistral-window": lambda: MistralConfig(**COMMON, sliding_window=20),
    "gemma2-softcap": lambda: Gemma2Config(
        **COMMON, head_dim=16, sliding_window=20, query_pre_attn_scalar=24, attn_logit_softcapping=5.0
    ),
    "granite-scale": lambda: GraniteConfig(**COMMON, attention_multiplier=0.07),
}


def tiny_model(name: str, *, seed: int = 0, max_context_tokens: int = 512) -> PreTrainedModel:
    """Its weights are exact in fp16, as the CPU kernels pack them: only their arithmetic can differ."""
    torch.manual_seed(seed)
    config = CONFIGS[name]()
    config.max_position_embeddings = max_context_tokens
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    model.half().float()
    model.eval()
    return model
