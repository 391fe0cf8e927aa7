"""An engine to compare, in a process of its own, told what to run by lines of JSON on its input.

It answers ``{"ready": {...}}`` once it is loaded, and then one line for each command:

    {"run": "decode", "batch": 8, "context": 512, "steps": 16}   -> {"step_s": [...]}
    {"run": "prefill", "num_tokens": 512}                        -> {"seconds": 1.2}

A decode step is one token for every sequence of the batch. Its context's KV is there before the clock
starts. Imported by interpreters that have nothing of ours installed: the standard library only.
"""

from __future__ import annotations

import json
import random
import sys
from abc import ABC, abstractmethod

VOCABULARY = range(1000, 40_000)


class Contender(ABC):
    """What a child process measures."""

    @abstractmethod
    def decode(self, *, batch: int, context: int, steps: int) -> list[float]:
        """Seconds of each of ``steps`` steps, or of fewer, each then a mean."""

    @abstractmethod
    def prefill(self, num_tokens: int) -> float:
        """Seconds from the prompt to the first token."""

    def facts(self) -> dict[str, int]:
        """About the model, for the roofs."""
        return {}


def answer_commands(contender: Contender) -> None:
    """Until the input ends."""
    _answer({"ready": contender.facts()})
    for line in sys.stdin:
        command = json.loads(line)
        if command.pop("run") == "decode":
            _answer({"step_s": contender.decode(**command)})
        else:
            _answer({"seconds": contender.prefill(**command)})


def prompt(num_tokens: int) -> list[int]:
    return random.choices(VOCABULARY, k=num_tokens)


def _answer(answer: dict[str, object]) -> None:
    print(f"answer {json.dumps(answer)}", flush=True)
