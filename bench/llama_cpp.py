"""llama.cpp as a contender, through its own benchmark: ``python -m bench.llama_cpp THREADS``.

F16 weights, made of the embedded model's file, and its F16 KV cache. The program is started for each
command and warms itself up; its clocks stop before sampling.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from bench.contender import Contender, answer_commands
from bench.peers import f16_gguf_path, llama_program


class LlamaCpp(Contender):
    def __init__(self, num_threads: int) -> None:
        self._threads = ["-t", str(num_threads), "-tb", str(num_threads)]

    def decode(self, *, batch: int, context: int, steps: int) -> list[float]:
        """The prompt is computed once and copied to the others: only the steps after it are timed."""
        measured = self._run(
            *("-npp", str(context), "-ntg", str(steps), "-npl", str(batch), "-pps"),
            *("-c", str(batch * (context + steps + 64))),
        )
        return [measured["t_tg"] / steps]

    def prefill(self, num_tokens: int) -> float:
        measured = self._run("-npp", str(num_tokens), "-ntg", "1", "-npl", "1", "-c", str(num_tokens + 64))
        return float(measured["t_pp"])

    def _run(self, *flags: str) -> dict[str, Any]:
        command = [llama_program("llama-batched-bench"), "-m", str(f16_gguf_path()), *self._threads, *flags]
        done = subprocess.run(
            [*command, "--output-format", "jsonl"], capture_output=True, text=True, check=True, timeout=600
        )
        (line,) = (line for line in done.stdout.splitlines() if line.startswith("{"))
        measured: dict[str, Any] = json.loads(line)
        return measured


if __name__ == "__main__":
    answer_commands(LlamaCpp(int(sys.argv[1])))
