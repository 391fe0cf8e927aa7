"""``scripts/bench serving``: output tokens per second over HTTP, beside other projects' servers.

The embedded model for all, aggregated, on the same cores; servers that are installed
(``scripts/bench peers --install``) run side by side and are asked in turns, the others idle.

    output_tokens_per_s   8 requests at once of 512 + 64 tokens: tokens over the time until the last ends
    ttft_ms, tpot_ms      per request; medians
    ratio_to_best_peer    ours over the faster of the others
"""

from __future__ import annotations

import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx

from bench.report import Report, arguments
from bench.servers import OURS, servers
from bench.systems import REQUEST_LIMIT_S, Prompts, System

NUM_STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 512, 64
QUICK_OUTPUT_TOKENS = 16
CONTEXT = 1024
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Answer:
    first_token_s: float
    last_token_s: float
    num_tokens: int

    @property
    def tpot_s(self) -> float:
        return (self.last_token_s - self.first_token_s) / (self.num_tokens - 1)


@dataclass(frozen=True, slots=True)
class Wave:
    """All streams at once, once."""

    answers: list[Answer]

    @property
    def output_tokens_per_s(self) -> float:
        return sum(answer.num_tokens for answer in self.answers) / max(
            answer.last_token_s for answer in self.answers
        )


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    options = parser.parse_args()
    report = Report("serving")
    for num_threads in options.threads:
        _compare(
            report,
            num_threads,
            rounds=1 if options.quick else ROUNDS,
            output_tokens=QUICK_OUTPUT_TOKENS if options.quick else OUTPUT_TOKENS,
        )
    report.print_table("threads", "impl")
    path = options.json or Path("bench/results/serving.json")
    report.write(path)
    print(f"\nmedians; rows in {path}")


def _compare(report: Report, num_threads: int, *, rounds: int, output_tokens: int) -> None:
    prompts = Prompts()
    with servers(num_threads, num_streams=NUM_STREAMS, context=CONTEXT) as systems:
        for system in systems.values():
            _wave(system, prompts, 4)  # opens connections, touches pages
        waves: dict[str, list[Wave]] = {name: [] for name in systems}
        for _ in range(rounds):
            for name, system in systems.items():
                waves[name].append(_wave(system, prompts, output_tokens))
    speed = {name: _add(report, name, own, num_threads) for name, own in waves.items()}
    others = [value for name, value in speed.items() if name != OURS]
    if others:
        report.add("ratio_to_best_peer", speed[OURS] / max(others), "", impl=OURS, threads=num_threads)


def _add(report: Report, name: str, waves: list[Wave], num_threads: int) -> float:
    answers = [answer for wave in waves for answer in wave.answers]
    speed = statistics.median(wave.output_tokens_per_s for wave in waves)
    ttft_ms = 1000 * statistics.median(answer.first_token_s for answer in answers)
    tpot_ms = 1000 * statistics.median(answer.tpot_s for answer in answers)
    for metric, value, unit in (
        ("output_tokens_per_s", speed, "tok/s"),
        ("ttft_ms", ttft_ms, "ms"),
        ("tpot_ms", tpot_ms, "ms"),
    ):
        report.add(metric, value, unit, impl=name, threads=num_threads)
    return speed


def _wave(system: System, prompts: Prompts, max_tokens: int) -> Wave:
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        asked = [
            pool.submit(_ask, system, prompts.of_length(PROMPT_TOKENS), max_tokens, time.perf_counter())
            for _ in range(NUM_STREAMS)
        ]
        return Wave([answer.result() for answer in asked])


def _ask(system: System, prompt: list[int], max_tokens: int, begin_s: float) -> Answer:
    body = {
        "model": system.model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    times: list[float] = []
    num_tokens = 0
    url = f"{system.url}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=REQUEST_LIMIT_S) as response:
        if not response.is_success:
            raise SystemExit(f"{url}: {response.status_code}: {response.read().decode()}")
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                times.append(time.perf_counter() - begin_s)
                num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
    assert num_tokens == max_tokens, f"{url} made {num_tokens} tokens, not {max_tokens}"
    return Answer(times[0], times[-1], num_tokens)


if __name__ == "__main__":
    main()
