"""What a client may ask of sampling, and the random numbers it uses. Pure.

The tensor work is ``pdserve.engine.sampler``. Random numbers come from a counter-based
generator keyed by (seed, position), never from a stream: whichever worker samples the
token at a position draws the same number, so a hand-off, a preemption or a failover
cannot change the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_MASK_64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Checked values; building one from client input is the router's task.

    ``temperature == 0`` is greedy. ``top_k == 0``, ``top_p == 1``, ``min_p == 0`` and
    penalties of 0 (repetition: 1) are off. ``num_logprobs`` is None for none, 0 for the
    chosen token's alone. ``max_tokens`` and ``min_tokens`` count output tokens.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None


def mix_64(value: int) -> int:
    """The splitmix64 finalizer (Steele, Lea and Flood, OOPSLA 2014): a bijection on 64 bits."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) for the token at ``position`` (index in prompt + output)."""
    return (mix_64(mix_64(seed & _MASK_64) ^ position) >> 11) / (1 << 53)


def choice_seed(seed: int, choice_index: int) -> int:
    """The seed of the ``choice_index``-th of n choices; choice 0 keeps the request's own."""
    return seed if choice_index == 0 else mix_64(seed & _MASK_64 ^ mix_64(choice_index))
