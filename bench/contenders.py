"""Ours and transformers' engines as contenders: ``python -m bench.contenders IMPL THREADS``."""

from __future__ import annotations

import sys
import time
from itertools import pairwise
from typing import Any

import torch

from bench.contender import Contender, answer_commands, prompt
from pdserve.engine.config import KVCacheDtype
from pdserve.kvcache.cells import quantize
from pdserve.kvcache.layout import SCALE_BYTES
from pdserve.model.embedded import embedded_model_path

CB_BLOCK_SIZE = 32


class Pdserve(Contender):
    """The engine as a worker runs it, without the worker."""

    def __init__(
        self, num_threads: int, kv_cache_dtype: KVCacheDtype = "auto", kv_cache_bytes: int = 4 << 30
    ) -> None:
        from pdserve.engine.build import assemble
        from pdserve.engine.config import EngineConfig
        from pdserve.model.loader import load_model

        loaded = load_model(embedded_model_path())
        self._facts = {
            "num_parameters": sum(parameter.numel() for parameter in loaded.model.parameters()),
            "attention_width": loaded.model.config.hidden_size * loaded.num_layers,
        }
        self._built = assemble(
            loaded,
            EngineConfig(
                kv_cache_bytes=kv_cache_bytes,
                num_threads=num_threads,
                enable_prefix_cache=False,
                kv_cache_dtype=kv_cache_dtype,
            ),
        )
        for pool in (*self._built.storage.k, *self._built.storage.v):
            pool.copy_(_random_block(pool))
        self._num_asked = 0

    def facts(self) -> dict[str, int]:
        layout = self._built.storage.layout
        return {**self._facts, "kv_token_bytes": layout.token_bytes}

    def decode(self, *, batch: int, context: int, steps: int) -> list[float]:
        engine = self._built.engine
        sequences = [self._sequence(context, steps + 2) for _ in range(batch)]
        for sequence in sequences:
            assert engine.hold(sequence), "the pool is too small"
            engine.adopt(sequence.seq_id, 1000)
        engine.step()
        times = [self._timed_step() for _ in range(steps)]
        for sequence in sequences:
            engine.abort(sequence.seq_id)
        return times

    def prefill(self, num_tokens: int) -> float:
        self._built.engine.add(self._sequence(num_tokens, 1))
        seconds = 0.0
        while self._built.engine.has_work:
            seconds += self._timed_step()
        return seconds

    def _timed_step(self) -> float:
        begin = time.perf_counter()
        self._built.engine.step()
        return time.perf_counter() - begin

    def _sequence(self, num_tokens: int, max_tokens: int) -> Any:
        from pdserve.engine.sequence import Sequence
        from pdserve.sampling import SamplingParams

        self._num_asked += 1
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        return Sequence(f"s{self._num_asked}", prompt(num_tokens), params)


def _random_block(pool: torch.Tensor) -> torch.Tensor:
    """The same for every block; a quantized cell ends in its scale."""
    num_heads, block_size, cell = pool.shape[1:]
    if pool.dtype in (torch.int8, torch.float8_e4m3fn):
        return quantize(torch.randn(num_heads, block_size, cell - SCALE_BYTES), pool.dtype)
    return torch.randn(num_heads, block_size, cell).to(pool.dtype)


class TransformersGenerate(Contender):
    def __init__(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self._model = _transformers_model()

    def decode(self, *, batch: int, context: int, steps: int) -> list[float]:
        return self._token_times(batch, context, steps + 2)[2:]

    def prefill(self, num_tokens: int) -> float:
        return self._token_times(1, num_tokens, 1)[0]

    def _token_times(self, batch: int, context: int, num_tokens: int) -> list[float]:
        """Seconds of each forward pass: generate asks its logits processors once after each."""
        from transformers import LogitsProcessorList

        moments = [time.perf_counter()]

        def note(token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            del token_ids
            moments.append(time.perf_counter())
            return scores

        prompts = torch.tensor([prompt(context) for _ in range(batch)])
        self._model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            logits_processor=LogitsProcessorList([note]),
        )
        return [later - earlier for earlier, later in pairwise(moments)]


class TransformersContinuousBatching(Contender):
    def __init__(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self._model = _transformers_model()

    def decode(self, *, batch: int, context: int, steps: int) -> list[float]:
        """Of the sequence that was last to begin: from there on, all are decoding."""
        times = self._token_times([prompt(context) for _ in range(batch)], steps + 2)
        last = max(times, key=lambda own: own[0])
        return [later - earlier for earlier, later in pairwise(last)][1:]

    def prefill(self, num_tokens: int) -> float:
        """Every run starts a manager of its own: what a prompt of one block takes is not counted."""
        short, long = (self._first_token_s(length) for length in (16, num_tokens))
        return long - short

    def _first_token_s(self, num_tokens: int) -> float:
        begin = time.perf_counter()
        return self._token_times([prompt(num_tokens)], 1)[0][0] - begin

    def _token_times(self, prompts: list[list[int]], max_new_tokens: int) -> list[list[float]]:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        num_cached_tokens = sum(map(len, prompts)) + len(prompts) * (max_new_tokens + CB_BLOCK_SIZE)
        cache = ContinuousBatchingConfig(  # left alone, it would take most of the machine's memory
            page_size=CB_BLOCK_SIZE,
            num_blocks=num_cached_tokens // CB_BLOCK_SIZE + 1,
            max_batch_tokens=max(map(len, prompts)),
        )
        config = GenerationConfig(
            max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        results = self._model.generate_batch(
            prompts,
            generation_config=config,
            continuous_batching_config=cache,
            record_timestamps=True,
            warmup=False,
        )
        times = [result.timestamps for result in results.values()]
        assert [len(own) for own in times] == [max_new_tokens] * len(prompts), results
        return times


def _transformers_model() -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        embedded_model_path(), dtype=torch.float32, attn_implementation="sdpa"
    )
    return model.eval()


CONTENDERS = {
    "pdserve": Pdserve,
    "transformers": TransformersGenerate,
    "transformers-cb": TransformersContinuousBatching,
}


@torch.inference_mode()
def main() -> None:
    impl, num_threads = sys.argv[1], int(sys.argv[2])
    answer_commands(CONTENDERS[impl](num_threads))


if __name__ == "__main__":
    main()
