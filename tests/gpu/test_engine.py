"""The engine on a GPU against transformers on a CPU. Written without one at hand."""

import copy

import pytest
import torch

from pdserve.engine.build import assemble
from pdserve.engine.config import EngineConfig
from pdserve.kvcache.layout import KVLayout, PoolOrder
from pdserve.kvcache.storage import KVStorage
from pdserve.model.attention.reference import ReferenceAttention
from pdserve.model.gpu import varlen_attention
from pdserve.model.vet import vet_model
from tests.support.engines import generate, greedy, reference_tokens
from tests.support.tiny_models import VOCAB_SIZE, tiny_model
from tests.unit.test_varlen_attention import ROWS

pytestmark = pytest.mark.gpu

PROMPTS = [[(7 * index + step) % VOCAB_SIZE for step in range(5 + 11 * index)] for index in range(6)]


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma2-softcap"])
def test_it_gives_the_tokens_of_transformers(name: str) -> None:
    model = tiny_model(name)
    built = assemble(vet_model(copy.deepcopy(model)), EngineConfig(device="cuda", num_blocks=64))
    expected = [reference_tokens(model, prompt, 12) for prompt in PROMPTS]
    assert generate(built.engine, PROMPTS, greedy(12)) == expected


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("block_size", [16, 64, 256])
def test_torchs_paged_kernel_agrees_with_the_reference(dtype: str, block_size: int) -> None:
    """Which block sizes it takes is not documented: the worker tries at start, and this says which."""
    from pdserve.model.attention.base import AttentionParams

    layout = KVLayout(1, 2, 64, dtype, block_size, PoolOrder.TOKEN_MAJOR)
    storage = KVStorage(layout, num_blocks=12, device="cuda")
    for pool in (*storage.k, *storage.v):
        pool.copy_(torch.randn(pool.shape))
    query = torch.randn(10, 6, 64, device="cuda", dtype=getattr(torch, dtype))
    for window in (None, 4):
        params = AttentionParams(scale=0.125, window=window)
        got, expected = (
            backend.attend(0, query, ROWS, params)
            for backend in (varlen_attention(storage), ReferenceAttention(storage))
        )
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
