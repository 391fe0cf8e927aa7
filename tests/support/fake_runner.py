"""A runner without a model: token n of a sequence is a function of its seed, so all is predictable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdserve.engine.engine import Engine
from pdserve.engine.sampler import SampledToken
from pdserve.engine.scheduler import Scheduler, SchedulerLimits, StepPlan
from pdserve.engine.sequence import Sequence
from pdserve.kvcache.block_pool import BlockPool

NUM_LAYERS = 2
VOCAB_SIZE = 100
EOS_TOKEN_ID = 1


def scripted_token(sequence: Sequence) -> int:
    """Of the position, never EOS."""
    return 2 + (sequence.sampling.seed + sequence.num_tokens) % (VOCAB_SIZE - 2)


class FakeRunner:
    """Checks, as a model cannot, that what it is asked to compute has a place of its own."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.plans: list[StepPlan] = []
        self.detached: set[str] = set()
        self.fail_next = False

    def execute(
        self, plan: StepPlan, *, on_boundary: Callable[[], None], on_layer_written: Callable[[int], None]
    ) -> list[SampledToken]:
        self.plans.append(plan)
        self.detached.clear()
        self._check_places(plan)
        sampled = [scripted_token(chunk.sequence) for chunk in plan.chunks if chunk.samples]
        for layer in range(NUM_LAYERS):
            on_boundary()
            on_layer_written(layer)
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("scripted failure")
        return [SampledToken(token_id, None) for token_id in sampled]

    def detach(self, seq_id: str) -> None:
        self.detached.add(seq_id)

    def _check_places(self, plan: StepPlan) -> None:
        written = [
            chunk.sequence.block_table[position // self._block_size] * self._block_size
            + position % self._block_size
            for chunk in plan.chunks
            for position in range(chunk.begin, chunk.end)
        ]
        assert len(set(written)) == len(written), "two tokens of a step share a place"


def fake_engine(*, num_blocks: int = 20, **limits: Any) -> tuple[Engine, FakeRunner]:
    settings = SchedulerLimits(**{"block_size": 4, "max_context_tokens": 64, **limits})
    pool = BlockPool(num_blocks)
    runner = FakeRunner(settings.block_size)
    engine = Engine(
        scheduler=Scheduler(pool, settings),
        pool=pool,
        runner=runner,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset({EOS_TOKEN_ID}),
        max_context_tokens=settings.max_context_tokens,
    )
    return engine, runner
