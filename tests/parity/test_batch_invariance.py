"""The same request has bitwise the same log-probabilities in any batch, chunking and pool.

Log-probabilities of the twenty likeliest tokens stand for the logits: each depends on all of them.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.sampler import TokenLogprobs
from pdserve.engine.sequence import Sequence
from tests.support.engines import greedy, real_engine, run_to_end
from tests.support.tiny_models import CONFIGS, VOCAB_SIZE, tiny_model

WATCHED = "watched"


def watched_logprobs(
    name: str, *, num_neighbours: int, chunk: int, block_size: int, seed: int
) -> list[TokenLogprobs]:
    rng = random.Random(seed)
    prompt = [3 + (7 * i) % 200 for i in range(41)]
    engine = real_engine(
        tiny_model(name),
        block_size=block_size,
        num_blocks=400,
        max_num_batched_tokens=chunk,
        prefill_chunk_tokens=max(1, chunk // 2),
    ).engine
    sequences = [Sequence(WATCHED, prompt, greedy(12, num_logprobs=20, ignore_eos=True))]
    for index in range(num_neighbours):
        length = rng.randrange(1, 70)
        tokens = [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]
        sequences.append(Sequence(str(index), tokens, greedy(rng.randrange(1, 20))))
    rng.shuffle(sequences)
    for sequence in sequences:
        engine.add(sequence)
    outputs = run_to_end(engine)
    return [logprobs for output in outputs if output.seq_id == WATCHED for logprobs in output.logprobs]


@pytest.mark.parametrize("name", sorted(CONFIGS))
@given(
    num_neighbours=st.integers(0, 9),
    chunk=st.integers(2, 80),
    block_size=st.sampled_from([4, 8, 16]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=6, deadline=None)
def test_neighbours_chunks_and_blocks_do_not_change_a_bit(
    name: str, num_neighbours: int, chunk: int, block_size: int, seed: int
) -> None:
    alone = watched_logprobs(name, num_neighbours=0, chunk=64, block_size=8, seed=0)
    assert len(alone) == 12
    assert (
        watched_logprobs(name, num_neighbours=num_neighbours, chunk=chunk, block_size=block_size, seed=seed)
        == alone
    )
