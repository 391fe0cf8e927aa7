"""The promise on the embedded model: real text, split over tcp and grpc, aggregated, transformers."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from bench.cluster import open_cluster
from pdserve.model.embedded import embedded_model_path
from pdserve.sampling import SamplingParams
from tests.support.engines import greedy, reference_tokens

MAX_TOKENS = 16
TEXTS = [
    "The river Nile flows through",
    "def fibonacci(n):\n    ",
    "Once upon a time there was a small house at the edge of a forest. In it lived",
]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        embedded_model_path(), dtype=torch.float32, attn_implementation="eager"
    )
    model.eval()
    return model


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(embedded_model_path())
    return [tokenizer(text).input_ids for text in TEXTS]


def test_split_aggregated_and_transformers_give_the_same_tokens(
    model: PreTrainedModel, prompts: list[list[int]]
) -> None:
    expected = [reference_tokens(model, prompt, MAX_TOKENS) for prompt in prompts]
    seeded = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.8, top_p=0.9, seed=11)
    sampled = []
    for way in ({"transport": "tcp"}, {"transport": "grpc"}, {"num_prefill": 0}):
        settings = {"block_size": 16, "max_num_batched_tokens": 16, **way}
        with open_cluster(model, **settings) as cluster:  # type: ignore[arg-type]
            assert cluster.generate_all(prompts, greedy(MAX_TOKENS)) == expected, way
            sampled.append(cluster.generate_all(prompts, seeded))
            cluster.assert_blocks_come_back()
    assert sampled == [sampled[0]] * len(sampled)
