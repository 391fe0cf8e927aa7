"""A GGUF file as a folder of safetensors: transformers reads it, we keep what it read.

Weights of the file's fp32 and bf16 types stay what they are. fp16 and the quantized types become
fp16, as the CPU kernels pack weights: from there on nothing is rounded again. torch and transformers
are imported only here, for the conversion.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    import torch


def save_as_safetensors(gguf: Path, target: Path) -> None:
    """Weights, configuration and tokenizer, into the empty folder ``target``. Raises ``ConfigError``."""
    for package in ("transformers", "gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            extras = "pip install 'pdserve[worker,embedded]'"
            raise ConfigError(f"reading {gguf.name} needs the package {package}: {extras}")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, name = gguf.parent, gguf.name
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=_weight_dtype(gguf))
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise ConfigError(f"{gguf} is no GGUF that transformers can read: {error}") from error
    # The weights are plain numbers from here on; transformers would refuse to save them as GGUF.
    del model.hf_quantizer
    del model.config.quantization_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _weight_dtype(gguf: Path) -> torch.dtype:
    """By the matrices: vectors are fp32 in every file."""
    import torch
    from gguf import GGMLQuantizationType as Type
    from gguf import GGUFReader

    types = {tensor.tensor_type for tensor in GGUFReader(gguf).tensors if len(tensor.shape) > 1}
    if types == {Type.F32}:
        return torch.float32
    return torch.bfloat16 if types <= {Type.BF16, Type.F32} else torch.float16
