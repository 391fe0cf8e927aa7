"""What this machine could do at best: its memory's speed, its multiplier's, and what a step needs of both.

Measured in the run that uses them, with the same number of threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

READ_BYTES = 256 << 20
GEMM = (1024, 576, 3072)


@dataclass(frozen=True, slots=True)
class Roofs:
    read_bytes_per_s: float
    flops_per_s: float

    def seconds(self, *, num_bytes: float, flops: float) -> float:
        """The least time a step can take: whichever limit it meets first."""
        return max(num_bytes / self.read_bytes_per_s, flops / self.flops_per_s)


@dataclass(frozen=True, slots=True)
class ModelWork:
    """What a step over a model must do: weights as packed, KV as stored."""

    num_parameters: int
    weight_bytes: int
    kv_token_bytes: int
    attention_width: int
    """num_layers × num_heads × head_dim."""

    def decode_bytes(self, *, batch: int, context: int) -> int:
        return self.weight_bytes + batch * context * self.kv_token_bytes

    def decode_flops(self, *, batch: int, context: int) -> int:
        return batch * (2 * self.num_parameters + 4 * context * self.attention_width)

    def prefill_flops(self, num_tokens: int) -> int:
        """Logits are computed for the last token alone, attention sees half the square."""
        return num_tokens * 2 * self.num_parameters + 2 * num_tokens**2 * self.attention_width


@torch.inference_mode()
def measure(num_threads: int, *, seconds: float = 0.5) -> Roofs:
    """Best of what fits into ``seconds`` each: a limit is not a median."""
    torch.set_num_threads(num_threads)
    block = torch.ones(READ_BYTES // 8, dtype=torch.int64)
    left, right = torch.randn(GEMM[0], GEMM[1]), torch.randn(GEMM[1], GEMM[2])
    out = torch.empty(GEMM[0], GEMM[2])
    read_s = _least_s(block.sum, seconds)
    gemm_s = _least_s(lambda: torch.mm(left, right, out=out), seconds)
    return Roofs(READ_BYTES / read_s, 2 * GEMM[0] * GEMM[1] * GEMM[2] / gemm_s)


def _least_s(run: Callable[[], object], seconds: float) -> float:
    run()
    least = float("inf")
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        begin = time.perf_counter()
        run()
        least = min(least, time.perf_counter() - begin)
    return least
