"""Sampling against a plain numpy reference, and rows that never touch each other."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.sampler import HEAD_WIDTH, Sampler
from pdserve.engine.sequence import Sequence
from pdserve.sampling import SamplingParams, choice_seed, uniform

VOCAB_SIZE = 400  # wider than the head that most draws are settled in
EOS = frozenset({7})


def logits(rows: int = 1, *, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * scale


def sequence(prompt: list[int] | None = None, output: list[int] | None = None, **params: object) -> Sequence:
    sampling = SamplingParams(**{"max_tokens": 50, **params})  # type: ignore[arg-type]
    return Sequence("s", prompt or [1, 2, 3], sampling, output_token_ids=output or [])


def sample_one(row: torch.Tensor, one: Sequence) -> int:
    return Sampler(EOS).sample(row.clone(), [one])[0].token_id


def reference_draw(row: torch.Tensor, params: SamplingParams, random: float) -> int:
    """The definition, over the whole vocabulary, without shortcuts."""
    scaled = row[0].double().numpy() / params.temperature
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    order = np.argsort(-probabilities, kind="stable")
    kept = probabilities[order]
    if params.min_p > 0:
        kept = kept[kept >= params.min_p * kept[0]]
    if params.top_k > 0:
        kept = kept[: params.top_k]
    if params.top_p < 1:
        kept = kept[: int(np.searchsorted(kept.cumsum(), params.top_p * kept.sum())) + 1]
    index = int(np.searchsorted(kept.cumsum(), random * kept.sum(), side="right"))
    return int(order[min(index, len(kept) - 1)])


@settings(max_examples=150, deadline=None)
@given(
    temperature=st.sampled_from([0.3, 0.9, 1.0, 5.0, 100.0]),
    top_p=st.sampled_from([1.0, 0.99, 0.9, 0.3]),
    top_k=st.sampled_from([0, 1, 5, HEAD_WIDTH + 20]),
    min_p=st.sampled_from([0.0, 0.02, 0.5]),
    seed=st.integers(0, 2**64 - 1),
)
def test_a_draw_is_the_one_of_the_definition(
    temperature: float, top_p: float, top_k: int, min_p: float, seed: int
) -> None:
    row = logits(seed=seed % 11)
    one = sequence(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed)
    random = uniform(seed, one.num_tokens)
    assert sample_one(row, one) == reference_draw(row, one.sampling, random)


def test_draws_follow_the_distribution() -> None:
    row = torch.full((1, VOCAB_SIZE), -50.0)
    row[0, :3] = torch.log(torch.tensor([0.6, 0.3, 0.1]))
    counts = np.bincount([sample_one(row, sequence(temperature=1.0, seed=seed)) for seed in range(2000)])
    assert counts[:3] / 2000 == pytest.approx([0.6, 0.3, 0.1], abs=0.04)


def test_the_same_seed_and_position_draw_the_same_whoever_sits_beside() -> None:
    """A seeded request alone, in each slot, and beside unseeded, penalised and greedy ones."""
    row = logits()
    seeded = sequence(temperature=0.9, seed=42)
    alone = sample_one(row, seeded)
    neighbours = [
        sequence(temperature=1.5, seed=7),
        sequence(frequency_penalty=1.05, output=[5, 5, 6]),
        sequence(),
    ]
    for slot in range(4):
        batch = [*neighbours[:slot], seeded, *neighbours[slot:]]
        rows = logits(4, seed=9)
        rows[slot] = row[0]
        assert Sampler(EOS).sample(rows, batch)[slot].token_id == alone


def test_positions_and_choices_draw_different_numbers() -> None:
    numbers = {uniform(1, position) for position in range(1000)}
    assert len(numbers) == 1000
    assert all(0 <= number < 1 for number in numbers)
    assert len({choice_seed(5, index) for index in range(100)}) == 100


def test_penalties_count_what_they_should() -> None:
    """Repetition: prompt and output. Presence and frequency: output only, prefill's token included."""
    base = logits()[0].numpy().astype(np.float64)
    one = sequence(
        prompt=[10, 11],
        output=[20, 20, 21],
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        num_logprobs=0,
    )
    row = torch.tensor(base[None], dtype=torch.float32)
    Sampler(EOS)._adjust(row[0], one)
    expected = base.copy()
    for token in (10, 11, 20, 21):
        expected[token] = expected[token] / 1.3 if expected[token] > 0 else expected[token] * 1.3
    expected[20] -= 0.5 + 0.25 * 2
    expected[21] -= 0.5 + 0.25
    assert row[0].numpy() == pytest.approx(expected, abs=1e-4)


def test_min_tokens_forbids_the_ends_until_then() -> None:
    row = logits()
    row[0, 7] = 99.0
    assert sample_one(row, sequence(min_tokens=2, output=[5])) != 7
    assert sample_one(row, sequence(min_tokens=2, output=[5, 6])) == 7
    assert sample_one(row, sequence(min_tokens=1, stop_token_ids=(9,), logit_bias={9: 200.0})) != 9


def test_bias_moves_a_token_and_nothing_else() -> None:
    row = logits()
    assert sample_one(row, sequence(logit_bias={33: 1e4})) == 33
    assert sample_one(row, sequence(logit_bias={int(row.argmax()): -1e4})) == int(row[0].topk(2).indices[1])


def test_logprobs_are_the_models_before_temperature_and_penalties() -> None:
    row = logits()
    one = sequence(temperature=0.5, seed=3, frequency_penalty=2.0, output=[1, 2], num_logprobs=4)
    (sampled,) = Sampler(EOS).sample(row.clone(), [one])
    expected = torch.log_softmax(row[0], dim=-1)
    assert sampled.logprobs is not None
    assert sampled.logprobs.logprob == pytest.approx(float(expected[sampled.token_id]), abs=1e-5)
    assert list(sampled.logprobs.top_token_ids) == expected.topk(4).indices.tolist()
    assert list(sampled.logprobs.top_logprobs) == sorted(sampled.logprobs.top_logprobs, reverse=True)
    (without,) = Sampler(EOS).sample(row.clone(), [sequence(num_logprobs=0)])
    assert without.logprobs is not None
    assert without.logprobs.top_token_ids == ()
