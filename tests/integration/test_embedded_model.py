"""The embedded model as it is converted: the numbers of the GGUF, and sensible text."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from pdserve.model import embedded
from pdserve.model_card import read_model_card


@pytest.fixture(scope="module")
def folder() -> Path:
    return embedded.embedded_model_path()


def test_the_card_has_what_a_router_needs(folder: Path) -> None:
    card = read_model_card(folder)
    assert card.name == "SmolLM2-135M-Instruct"
    assert card.vocab_size == 49152
    assert card.max_context_tokens == 8192
    assert card.chat_template is not None
    assert card.special_tokens["eos_token"] == "<|im_end|>"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert card.eos_token_ids == {tokenizer.convert_tokens_to_ids("<|im_end|>")}


def test_the_weights_are_the_dequantized_ones(folder: Path) -> None:
    reader = GGUFReader(embedded._package_folder() / embedded._GGUF)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    weights = load_file(folder / "model.safetensors")
    for ours, theirs in [("mlp.down_proj", "ffn_down"), ("self_attn.v_proj", "attn_v")]:
        tensor = stored[f"blk.3.{theirs}.weight"]
        expected = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type)).half()
        assert torch.equal(weights[f"model.layers.3.{ours}.weight"], expected)


def test_it_answers_a_question(folder: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
