"""Checkpoints as they are found in the world: types of weights, shards, GGUF; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from torch import nn
from transformers import AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

from pdserve.engine.build import assemble
from pdserve.engine.config import EngineConfig, WeightDtype
from pdserve.engine.sequence import Sequence
from pdserve.errors import UnsupportedModel
from pdserve.model import gguf_file
from pdserve.model.loader import load_model
from pdserve.sampling import SamplingParams
from tests.support.tiny_models import CONFIGS, tiny_model

PROMPT = list(range(5, 45))
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def save(name: str, dtype: torch.dtype, folder: Path) -> None:
    model = tiny_model(name)
    nn.Module.to(model, dtype)
    model.save_pretrained(folder)


def greedy(folder: Path, weight_dtype: WeightDtype = "fp16", num_tokens: int = 12) -> list[int]:
    engine = assemble(load_model(folder), EngineConfig(num_blocks=20, weight_dtype=weight_dtype)).engine
    engine.add(Sequence("s", PROMPT, SamplingParams(max_tokens=num_tokens, ignore_eos=True)))
    tokens: list[int] = []
    while engine.has_work:
        for output in engine.step():
            tokens += output.token_ids
    return tokens


def expected(folder: Path, num_tokens: int = 12) -> list[int]:
    """transformers' own, from the same numbers in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.generation_config.eos_token_id = None  # as ignore_eos
    output = model.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=num_tokens)
    tokens: list[int] = output[0, len(PROMPT) :].tolist()
    return tokens


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_any_type_of_weights_gives_the_tokens_of_float32_arithmetic(
    name: str, dtype: str, tmp_path: Path
) -> None:
    save(name, DTYPES[dtype], tmp_path)
    assert greedy(tmp_path) == expected(tmp_path)


@pytest.mark.parametrize("weight_dtype", ["model", "fp32"])
def test_half_precision_weights_computed_in_float32(weight_dtype: WeightDtype, tmp_path: Path) -> None:
    save("llama", torch.bfloat16, tmp_path)
    assert greedy(tmp_path, weight_dtype) == expected(tmp_path)


def test_a_checkpoint_in_shards(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert greedy(tmp_path) == expected(tmp_path)


def test_a_lost_shard_is_named(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="100KB")
    sorted(tmp_path.glob("model-*.safetensors"))[0].unlink()
    with pytest.raises(UnsupportedModel, match="cannot be loaded"):
        load_model(tmp_path)


def test_missing_weights_are_never_made_up(tmp_path: Path) -> None:
    model = tiny_model("llama")
    state = {name: tensor for name, tensor in model.state_dict().items() if "layers.1.mlp" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(UnsupportedModel, match=r"lacks weights: model.layers.1.mlp"):
        load_model(tmp_path)


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match="safetensors"):
        load_model(tmp_path)


def test_a_quantized_checkpoint_is_refused_by_its_method(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="quantized by 'gptq'"):
        load_model(tmp_path)


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    config = T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="t5 is an encoder-decoder"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (GGMLQuantizationType.F32, torch.float32),
        (GGMLQuantizationType.F16, torch.float16),
        (GGMLQuantizationType.BF16, torch.bfloat16),
    ],
)
def test_a_gguf_keeps_its_type(kind: GGMLQuantizationType, dtype: torch.dtype, tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    writer = GGUFWriter(file, "llama")
    matrix = np.zeros((4, 32), np.float32)
    if kind is GGMLQuantizationType.BF16:
        writer.add_tensor("w", matrix.astype(np.uint16).view(np.uint8), raw_dtype=kind)
    else:
        writer.add_tensor("w", matrix.astype(np.float16) if kind is GGMLQuantizationType.F16 else matrix)
    writer.add_tensor("norm", np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert gguf_file._weight_dtype(file) is dtype
