"""Steps before the first request: kernels are compiled, or read from their cache, on first use.

Without them the first request would wait for that, and an abort with it: commands run between
two layers, and a compiler is not interrupted. All rows go to the null block.
"""

from __future__ import annotations

from pdserve.engine.runner import Runner
from pdserve.engine.scheduler import Chunk, StepPlan
from pdserve.engine.sequence import Sequence
from pdserve.kvcache.block_pool import NULL_BLOCK
from pdserve.kvcache.layout import KVLayout
from pdserve.sampling import SamplingParams

NUM_TOKENS = 9


def warm_up(runner: Runner, layout: KVLayout) -> None:
    """Every kind of step: a prompt, one sequence that decodes, several, and both together."""
    sequences = [_sequence(f"warm-up-{index}", layout) for index in range(2)]
    prompts = [Chunk(sequence, 0, NUM_TOKENS) for sequence in sequences]
    decodes = [Chunk(sequence, NUM_TOKENS - 1, 1) for sequence in sequences]
    for chunks in (prompts, decodes[:1], decodes, [decodes[0], prompts[1]]):
        runner.execute(StepPlan(tuple(chunks)), on_boundary=_no_command, on_layer_written=_nobody_listens)


def _sequence(seq_id: str, layout: KVLayout) -> Sequence:
    return Sequence(
        seq_id,
        [0] * NUM_TOKENS,
        SamplingParams(max_tokens=1),
        block_table=[NULL_BLOCK] * layout.num_blocks_for(NUM_TOKENS),
    )


def _no_command() -> None:
    """Nobody can post one yet."""


def _nobody_listens(layer: int) -> None:
    del layer
