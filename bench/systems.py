"""Whole systems to measure, started as a user starts them, and a client that times every token."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import httpx
from tokenizers import Tokenizer

from pdserve.model.embedded import embedded_model_path

START_LIMIT_S = 120.0
REQUEST_LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class System:
    url: str
    model: str
    process_id: int


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """``token_times_s``: when each token's event reached the client, from the moment of asking."""

    token_times_s: list[float]
    timing: dict[str, Any]

    @property
    def ttft_ms(self) -> float:
        return self.token_times_s[0] * 1000

    @property
    def gap_ms(self) -> float:
        """Token 1 to token 2."""
        return (self.token_times_s[1] - self.token_times_s[0]) * 1000

    @property
    def itls_ms(self) -> list[float]:
        """From token 2 on."""
        times = self.token_times_s[1:]
        return [(later - earlier) * 1000 for earlier, later in pairwise(times)]


@contextmanager
def started(flags_of: dict[str, tuple[str, ...]]) -> Iterator[dict[str, System]]:
    """``pdserve up`` for each name with its flags, on free ports, until the block ends."""
    command = [sys.executable, "-m", "pdserve", "up", "--port", "0", "--log-level", "warning"]
    processes = {
        name: subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, text=True)
        for name, flags in flags_of.items()
    }
    try:
        yield {name: _wait_until_serving(process) for name, process in processes.items()}
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            process.communicate(timeout=60)


def _wait_until_serving(process: subprocess.Popen[str]) -> System:
    url = _wait_for_url(process)
    model = httpx.get(f"{url}/v1/models", timeout=10).json()["data"][0]["id"]
    return System(url, model, process.pid)


def _wait_for_url(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if match := re.search(r"ready at (http://\S+)", line):
            return match[1]
    raise SystemExit(f"the system did not start: exit code {process.wait()}")


WORDS = (
    "river stone window morning garden letter silver music winter paper station market doctor island "
    "bridge summer village engine mountain forest kitchen teacher hospital picture history machine"
)


class Prompts:
    """Random words, never the same twice, so that no cache shortens a prompt."""

    def __init__(self, seed: int | None = None) -> None:
        self._tokenizer = Tokenizer.from_file(str(embedded_model_path() / "tokenizer.json"))
        self._rng = random.Random(seed)

    def of_length(self, num_tokens: int) -> list[int]:
        text = " ".join(self._rng.choices(WORDS.split(), k=num_tokens))
        token_ids: list[int] = self._tokenizer.encode(text).ids
        return token_ids[:num_tokens]


def ask(system: System, prompt: list[int], *, max_tokens: int) -> TimedAnswer:
    body = {
        "model": system.model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "timing": True,
        "logprobs": 0,  # so that a token whose text is held back still has its event
    }
    times: list[float] = []
    timing: dict[str, Any] = {}
    begin_s = time.perf_counter()
    url = f"{system.url}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=REQUEST_LIMIT_S) as response:
        if response.status_code != httpx.codes.OK:
            raise SystemExit(f"{response.status_code}: {response.read().decode()}")
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[len("data: ") :])
                if "error" in event:
                    raise SystemExit(event["error"]["message"])
                times += [time.perf_counter() - begin_s] * _num_tokens(event)
                timing = event.get("pdserve", timing)
    return TimedAnswer(times, timing)


def _num_tokens(event: dict[str, Any]) -> int:
    return sum(len((choice.get("logprobs") or {}).get("tokens", ())) for choice in event["choices"])
