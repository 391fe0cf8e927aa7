"""The product's promise: disaggregated == aggregated == transformers, token for token."""

import random

import pytest
from transformers import PreTrainedModel

from bench.cluster import open_cluster
from pdserve.sampling import SamplingParams
from tests.support.engines import greedy, reference_tokens
from tests.support.tiny_models import CONFIGS, EOS_TOKEN_ID, VOCAB_SIZE, tiny_model

MAX_TOKENS = 16
WAYS = {
    "shm": {"transport": "shm"},
    "tcp": {"transport": "tcp"},
    "grpc": {"transport": "grpc"},
    "other-block-size": {"transport": "tcp", "decode_block_size": 5},
    "aggregated": {"num_prefill": 0},
}


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(5, 60))] for _ in range(count)]


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def expected(model: PreTrainedModel) -> list[list[int]]:
    return [reference_tokens(model, prompt, MAX_TOKENS) for prompt in prompts(4)]


@pytest.mark.parametrize("way", sorted(WAYS))
def test_every_way_gives_the_tokens_of_transformers(
    model: PreTrainedModel, expected: list[list[int]], way: str
) -> None:
    """At once, one after the other (prefix hits), three times the same, and one token only."""
    with open_cluster(model, **WAYS[way]) as cluster:  # type: ignore[arg-type]
        assert cluster.generate_all(prompts(4), greedy(MAX_TOKENS)) == expected
        assert [cluster.generate(prompt, greedy(MAX_TOKENS)) for prompt in prompts(4)] == expected
        assert cluster.generate_all([prompts(4)[1]] * 3, greedy(MAX_TOKENS)) == [expected[1]] * 3
        assert cluster.generate(prompts(4)[0], greedy(1)) == expected[0][:1]
        cluster.assert_blocks_come_back()


@pytest.mark.parametrize("chunk", [5, 64])
@pytest.mark.parametrize("block_size", [4, 16])
def test_chunk_and_block_sizes_do_not_matter(chunk: int, block_size: int) -> None:
    model = tiny_model("llama")
    expected = [reference_tokens(model, prompt, MAX_TOKENS) for prompt in prompts(4)]
    with open_cluster(model, max_num_batched_tokens=chunk, block_size=block_size) as cluster:
        assert cluster.generate_all(prompts(4), greedy(MAX_TOKENS)) == expected
        cluster.assert_blocks_come_back()


def test_preemption_on_decode_changes_nothing() -> None:
    model = tiny_model("qwen3")
    some = [prompt[:20] for prompt in prompts(4) if len(prompt) >= 8]
    expected = [reference_tokens(model, prompt, 40) for prompt in some]
    with open_cluster(model, block_size=4, decode_num_blocks=22, enable_prefix_cache=False) as cluster:
        assert cluster.generate_all(some, greedy(40)) == expected
        assert cluster.decode[0].stats.num_preemptions > 0
        cluster.assert_blocks_come_back()


def test_eos_as_the_first_token_ends_on_prefill_and_frees_decode() -> None:
    with open_cluster(tiny_model("llama")) as cluster:
        sampling = greedy(MAX_TOKENS, logit_bias={EOS_TOKEN_ID: 1e4})
        assert cluster.generate(prompts(1)[0], sampling) == [EOS_TOKEN_ID]
        cluster.assert_blocks_come_back()


def test_seeded_sampling_does_not_depend_on_where_it_runs() -> None:
    sampling = SamplingParams(
        max_tokens=MAX_TOKENS,
        temperature=0.9,
        top_p=0.95,
        top_k=50,
        seed=1234,
        frequency_penalty=0.5,
        repetition_penalty=1.2,
    )
    model = tiny_model("llama")
    outputs = []
    for way in sorted(WAYS):
        with open_cluster(model, **WAYS[way]) as cluster:  # type: ignore[arg-type]
            outputs.append(cluster.generate_all(prompts(4), sampling))
    assert outputs == [outputs[0]] * len(WAYS)
    assert len({tuple(tokens) for tokens in outputs[0]}) == 4
