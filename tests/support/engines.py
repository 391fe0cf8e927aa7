"""Engines for tests: a real one over a model, and a helper that runs it to the end."""

from __future__ import annotations

import copy
from collections.abc import Sequence as SequenceOf

import torch
from transformers import PreTrainedModel

from pdserve.engine.build import BuiltEngine, assemble
from pdserve.engine.config import EngineConfig
from pdserve.engine.engine import Engine, StepOutput
from pdserve.engine.sequence import Sequence
from pdserve.model.vet import vet_model
from pdserve.sampling import SamplingParams


def real_engine(model: PreTrainedModel, **config: object) -> BuiltEngine:
    settings = {"num_blocks": 64, "block_size": 8, "max_num_batched_tokens": 64} | config
    return assemble(vet_model(copy.deepcopy(model)), EngineConfig(**settings))  # type: ignore[arg-type]


def greedy(max_tokens: int, **params: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]


def run_to_end(engine: Engine, *, max_steps: int = 5000) -> list[StepOutput]:
    outputs: list[StepOutput] = []
    for _ in range(max_steps):
        if not engine.has_work:
            return outputs
        outputs += engine.step()
        engine.check_integrity()
    raise AssertionError(f"the engine still has work after {max_steps} steps")


def tokens_of(outputs: SequenceOf[StepOutput], seq_id: str) -> list[int]:
    return [token for output in outputs if output.seq_id == seq_id for token in output.token_ids]


def generate(engine: Engine, prompts: SequenceOf[list[int]], sampling: SamplingParams) -> list[list[int]]:
    """All prompts at once; ends with the leak check."""
    for index, prompt in enumerate(prompts):
        engine.add(Sequence(str(index), list(prompt), sampling))
    outputs = run_to_end(engine)
    assert_nothing_leaked(engine)
    return [tokens_of(outputs, str(index)) for index in range(len(prompts))]


def assert_nothing_leaked(engine: Engine) -> None:
    engine.check_integrity()
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_usable_blocks, stats
    assert stats.num_running == stats.num_waiting == stats.num_held == stats.num_kept == 0, stats


@torch.inference_mode()
def reference_tokens(model: PreTrainedModel, prompt: list[int], max_tokens: int) -> list[int]:
    """What ``transformers`` itself generates, greedily."""
    output = model.generate(  # type: ignore[operator]
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=max_tokens,
        do_sample=False,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens
