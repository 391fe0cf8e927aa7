"""Logits to tokens. What one row asks for never touches another.

Order, as in the OpenAI-style servers: logit bias, min_tokens, penalties; then greedy, or
temperature, min_p, top_k, top_p (each on what the one before left) and one draw by inverse
CDF over the descending distribution with the number that (seed, position) gives.
Log-probabilities are those of the model, before any of this.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from collections.abc import Set
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.engine.finish import stop_token_ids
from pdserve.engine.sequence import Sequence
from pdserve.sampling import SamplingParams, uniform

# Almost every draw falls among the likeliest few; the whole vocabulary is sorted only if not.
HEAD_WIDTH = 256


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    logprob: float
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class SampledToken:
    token_id: int
    logprobs: TokenLogprobs | None


class Sampler:
    def __init__(self, eos_token_ids: Set[int]) -> None:
        self._eos_token_ids = eos_token_ids

    def sample(self, logits: Tensor, sequences: SequenceOf[Sequence]) -> list[SampledToken]:
        """``logits``: [sequences, vocabulary], float32; not kept, may be changed in place."""
        raw = {
            index: torch.log_softmax(logits[index], dim=-1)
            for index, sequence in enumerate(sequences)
            if sequence.sampling.num_logprobs is not None
        }
        for row, sequence in zip(logits, sequences, strict=True):
            self._adjust(row, sequence)
        token_ids = logits.argmax(dim=-1).tolist()
        for index, sequence in enumerate(sequences):
            if sequence.sampling.temperature > 0:
                random = uniform(sequence.sampling.seed, sequence.num_tokens)
                token_ids[index] = _draw(logits[index], sequence.sampling, random)
        return [
            SampledToken(token_id, self._logprobs(raw.get(index), token_id, sequence.sampling))
            for index, (token_id, sequence) in enumerate(zip(token_ids, sequences, strict=True))
        ]

    def _adjust(self, row: Tensor, sequence: Sequence) -> None:
        sampling = sequence.sampling
        if sampling.logit_bias:
            tokens = torch.tensor(list(sampling.logit_bias))
            row[tokens] += torch.tensor(list(sampling.logit_bias.values()))
        if len(sequence.output_token_ids) < sampling.min_tokens:
            forbidden = stop_token_ids(sequence, self._eos_token_ids)
            row[torch.tensor(sorted(forbidden), dtype=torch.int64)] = float("-inf")
        if sampling.repetition_penalty != 1.0:
            _penalize_repetition(row, sequence)
        if sampling.presence_penalty or sampling.frequency_penalty:
            _penalize_presence(row, sequence)

    @staticmethod
    def _logprobs(row: Tensor | None, token_id: int, sampling: SamplingParams) -> TokenLogprobs | None:
        if row is None:
            return None
        if not sampling.num_logprobs:
            return TokenLogprobs(float(row[token_id]))
        top = row.topk(sampling.num_logprobs)
        return TokenLogprobs(float(row[token_id]), tuple(top.indices.tolist()), tuple(top.values.tolist()))


def _penalize_repetition(row: Tensor, sequence: Sequence) -> None:
    """Over prompt and output (CTRL, arXiv 1909.05858, section 4.1)."""
    seen = torch.tensor(sequence.token_ids).unique()
    values = row[seen]
    penalty = sequence.sampling.repetition_penalty
    row[seen] = torch.where(values > 0, values / penalty, values * penalty)


def _penalize_presence(row: Tensor, sequence: Sequence) -> None:
    """Over the output only, as OpenAI defines both."""
    if not sequence.output_token_ids:
        return
    seen, counts = torch.tensor(sequence.output_token_ids).unique(return_counts=True)
    row[seen] -= sequence.sampling.presence_penalty + sequence.sampling.frequency_penalty * counts


def _draw(row: Tensor, sampling: SamplingParams, random: float) -> int:
    probabilities = torch.softmax(row / sampling.temperature, dim=-1)
    for width in (min(HEAD_WIDTH, row.shape[0]), row.shape[0]):
        head = probabilities.topk(width)
        index = _pick(head.values, sampling, random, is_whole=width == row.shape[0])
        if index is not None:
            return int(head.indices[index])
    raise AssertionError("the whole distribution always holds the draw")


def _pick(head: Tensor, sampling: SamplingParams, random: float, *, is_whole: bool) -> int | None:
    """Index into ``head`` (probabilities, descending); None when the draw may lie behind it."""
    kept = len(head)
    if sampling.min_p > 0:
        kept = int((head >= sampling.min_p * head[0]).sum())
    if sampling.top_k > 0:
        kept = min(kept, sampling.top_k)
    is_bounded = is_whole or kept < len(head)
    if not is_bounded and (sampling.min_p > 0 or sampling.top_k > 0):
        return None  # the filters end somewhere behind the head, with a mass not known here
    cumulative = head[:kept].double().cumsum(0)
    mass = float(cumulative[-1]) if is_bounded else 1.0
    if sampling.top_p < 1:
        nucleus = int(torch.searchsorted(cumulative, sampling.top_p * mass))
        if nucleus >= kept and not is_bounded:
            return None
        mass = float(cumulative[min(nucleus, kept - 1)])
    index = int(torch.searchsorted(cumulative, random * mass, right=True))
    if index >= kept and not is_bounded:
        return None
    return min(index, kept - 1)
