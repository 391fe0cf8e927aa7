"""``scripts/bench soak``: what thousands of requests leave behind in memory.

Resident memory of each process of a running system: after a warm-up, and after 2,000 requests more of
mixed lengths, 8 at a time, a part of them given up by their client.

    rss_mb             at that moment, per process
    growth_mb          since the warm-up
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil

from bench.report import Report, arguments
from bench.systems import REQUEST_LIMIT_S, Prompts, System, started

WARM_UP_REQUESTS, NUM_REQUESTS, QUICK_NUM_REQUESTS = 400, 2000, 100
AT_ONCE = 8
LONGEST_PROMPT, MOST_TOKENS = 48, 8
GIVEN_UP_SHARE = 0.05
MB = 1 << 20


def main() -> None:
    options = arguments(__doc__.splitlines()[0]).parse_args()
    report = Report("soak")
    with started({"pd": ("--threads", "1")}) as systems:
        system = systems["pd"]
        _ask_many(system, QUICK_NUM_REQUESTS if options.quick else WARM_UP_REQUESTS)
        before = _rss_mb(system)
        num_requests = QUICK_NUM_REQUESTS if options.quick else NUM_REQUESTS
        _ask_many(system, num_requests)
        after = _rss_mb(system)
    for name, rss_mb in after.items():
        report.add("rss_mb", rss_mb, "MB", process=name, num_requests=num_requests)
        report.add("growth_mb", rss_mb - before[name], "MB", process=name, num_requests=num_requests)
    report.print_table("process", "num_requests")
    path = options.json or Path("bench/results/soak.json")
    report.write(path)
    print(f"\nrows in {path}")


def _ask_many(system: System, count: int) -> None:
    prompts, rng = Prompts(), random.Random()
    limits = httpx.Limits(max_connections=AT_ONCE)
    with httpx.Client(limits=limits, timeout=REQUEST_LIMIT_S) as client, ThreadPoolExecutor(AT_ONCE) as pool:
        asked = [
            pool.submit(
                _ask,
                client,
                system,
                prompts.of_length(rng.randint(4, LONGEST_PROMPT)),
                is_given_up=rng.random() < GIVEN_UP_SHARE,
            )
            for _ in range(count)
        ]
        for answer in asked:
            answer.result()


def _ask(client: httpx.Client, system: System, prompt: list[int], *, is_given_up: bool) -> None:
    body = {"model": system.model, "prompt": prompt, "max_tokens": MOST_TOKENS, "stream": True}
    with client.stream("POST", f"{system.url}/v1/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            assert "error" not in line, line
            if is_given_up and line:
                return


def _rss_mb(system: System) -> dict[str, float]:
    """By program; the system's first process starts the others."""
    parent = psutil.Process(system.process_id)
    named = {"pdserve up": parent} | {_program(child): child for child in parent.children(recursive=True)}
    return {name: process.memory_info().rss / MB for name, process in named.items()}


def _program(process: psutil.Process) -> str:
    programs = [word for word in process.cmdline() if word.startswith("pdserve_")]
    return str(programs[0] if programs else process.name())


if __name__ == "__main__":
    main()
