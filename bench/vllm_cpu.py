"""vLLM's CPU build as a contender: ``python -m bench.vllm_cpu MODEL_FOLDER``.

Run by its own Python, with ``peers.vllm_environment``.
"""

from __future__ import annotations

import sys
import time

from bench.contender import Contender, answer_commands, prompt

LARGEST_BATCH, LARGEST_CONTEXT = 32, 2048
STEPS_BEFORE_MEASURING = 2


class VllmCpu(Contender):
    """Its engine in this process, stepped by us; compiled, as it is by default."""

    def __init__(self, model_folder: str) -> None:
        from vllm import EngineArgs, LLMEngine

        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=model_folder,
                dtype="float32",
                max_model_len=LARGEST_CONTEXT + 256,
                max_num_seqs=LARGEST_BATCH,
                enable_prefix_caching=False,
            )
        )
        self._num_asked = 0

    def decode(self, *, batch: int, context: int, steps: int) -> list[float]:
        """From where all sequences have their first token."""
        num_tokens = dict.fromkeys((self._add(context, 4 * steps + 512) for _ in range(batch)), 0)
        while min(num_tokens.values()) < STEPS_BEFORE_MEASURING:
            for output in self._engine.step():
                num_tokens[output.request_id] = len(output.outputs[0].token_ids)
        times = [self._timed_step() for _ in range(steps)]
        self._engine.abort_request(list(num_tokens))
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return times

    def prefill(self, num_tokens: int) -> float:
        self._add(num_tokens, 1)
        seconds = 0.0
        while self._engine.has_unfinished_requests():
            seconds += self._timed_step()
        return seconds

    def _timed_step(self) -> float:
        begin = time.perf_counter()
        self._engine.step()
        return time.perf_counter() - begin

    def _add(self, num_prompt_tokens: int, max_tokens: int) -> str:
        from vllm import SamplingParams

        self._num_asked += 1
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        request_id = f"r{self._num_asked}"
        self._engine.add_request(request_id, {"prompt_token_ids": prompt(num_prompt_tokens)}, params)
        return request_id


if __name__ == "__main__":
    answer_commands(VllmCpu(sys.argv[1]))
