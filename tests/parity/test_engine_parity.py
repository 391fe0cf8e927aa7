"""Our engine gives transformers' own tokens, whatever the chunks, blocks and neighbours."""

import random

import pytest
from transformers import PreTrainedModel

from pdserve.engine.sequence import Sequence
from tests.support.engines import (
    assert_nothing_leaked,
    generate,
    greedy,
    real_engine,
    reference_tokens,
    run_to_end,
    tokens_of,
)
from tests.support.tiny_models import CONFIGS, EOS_TOKEN_ID, VOCAB_SIZE, tiny_model

MAX_TOKENS = 24


def prompts(count: int, *, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(5, 60))] for _ in range(count)]


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def expected(model: PreTrainedModel) -> list[list[int]]:
    outputs = [reference_tokens(model, prompt, MAX_TOKENS) for prompt in prompts(4)]
    assert any(len(set(tokens)) > 4 for tokens in outputs), "a model that repeats itself proves nothing"
    return outputs


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("chunk", [3, 17, 64])
def test_any_chunk_and_block_size_gives_the_tokens_of_transformers(
    model: PreTrainedModel, expected: list[list[int]], block_size: int, chunk: int
) -> None:
    engine = real_engine(
        model, block_size=block_size, max_num_batched_tokens=chunk, prefill_chunk_tokens=chunk
    ).engine
    assert generate(engine, prompts(4), greedy(MAX_TOKENS)) == expected


def test_a_request_alone_gives_the_same_as_among_neighbours(
    model: PreTrainedModel, expected: list[list[int]]
) -> None:
    engine = real_engine(model).engine
    assert [generate(engine, [prompt], greedy(MAX_TOKENS))[0] for prompt in prompts(4)] == expected


def test_a_prefix_hit_changes_nothing(model: PreTrainedModel, expected: list[list[int]]) -> None:
    engine = real_engine(model).engine
    for _ in range(2):
        assert generate(engine, prompts(4), greedy(MAX_TOKENS)) == expected
    assert engine.stats().num_cached_tokens > 0


def test_preemption_changes_nothing(model: PreTrainedModel, expected: list[list[int]]) -> None:
    longest = max(len(prompt) for prompt in prompts(4)) + MAX_TOKENS
    engine = real_engine(
        model, block_size=4, num_blocks=2 + longest // 4 + 8, enable_prefix_cache=False
    ).engine
    assert generate(engine, prompts(4), greedy(MAX_TOKENS)) == expected
    assert engine.stats().num_preemptions > 0


def test_n_copies_of_a_prompt_agree(model: PreTrainedModel, expected: list[list[int]]) -> None:
    engine = real_engine(model).engine
    assert generate(engine, [prompts(4)[0]] * 3, greedy(MAX_TOKENS)) == [expected[0]] * 3


def test_one_token_is_one_token(model: PreTrainedModel, expected: list[list[int]]) -> None:
    assert generate(real_engine(model).engine, prompts(4), greedy(1)) == [tokens[:1] for tokens in expected]


def test_a_resumed_sequence_goes_on_where_it_stopped(
    model: PreTrainedModel, expected: list[list[int]]
) -> None:
    whole = max(expected, key=len)
    prompt = prompts(4)[expected.index(whole)]
    engine = real_engine(model).engine
    engine.add(Sequence("resumed", prompt, greedy(MAX_TOKENS), output_token_ids=whole[:9]))
    outputs = run_to_end(engine)
    assert outputs[0].first_index == 9
    assert tokens_of(outputs, "resumed") == whole[9:]
    assert_nothing_leaked(engine)


def test_eos_as_the_first_token_ends_at_once(model: PreTrainedModel) -> None:
    engine = real_engine(model).engine
    engine.add(Sequence("eos", prompts(1)[0], greedy(MAX_TOKENS, logit_bias={EOS_TOKEN_ID: 1e4})))
    (output,) = run_to_end(engine)
    assert (output.token_ids, output.finish_reason) == ((EOS_TOKEN_ID,), "stop")
    assert_nothing_leaked(engine)
