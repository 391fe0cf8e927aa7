"""``scripts/bench prefix``: time to the first token of a prompt whose beginning has been seen.

One prefill and one decode worker; pairs of requests share a prefix of 1,024 tokens and nothing else.

    ttft_ms          medians over pairs: the first request of a pair, and the second
    ratio            the second's over the first's
    cached_tokens    of the second, as its usage says
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

from bench.report import Report, arguments
from bench.systems import REQUEST_LIMIT_S, Prompts, System, started

PREFIX_TOKENS, OWN_TOKENS = 1024, 16
NUM_PAIRS, QUICK_NUM_PAIRS = 5, 1


@dataclass(frozen=True, slots=True)
class FirstToken:
    ttft_ms: float
    num_cached_tokens: int


def main() -> None:
    options = arguments(__doc__.splitlines()[0]).parse_args()
    prompts = Prompts()
    report = Report("prefix")
    with started({"pd": ("--threads", "1")}) as systems:
        _ask(systems["pd"], prompts.of_length(64))  # opens links, touches pages
        pairs = [
            _ask_pair(systems["pd"], prompts) for _ in range(QUICK_NUM_PAIRS if options.quick else NUM_PAIRS)
        ]
    first_ms, second_ms = (statistics.median(pair[index].ttft_ms for pair in pairs) for index in (0, 1))
    report.add("ttft_ms", first_ms, "ms", request="first")
    report.add("ttft_ms", second_ms, "ms", request="second")
    report.add("cached_tokens", min(second.num_cached_tokens for _, second in pairs), "", request="second")
    report.add("ratio", second_ms / first_ms, "", request="second")
    report.print_table("request")
    path = options.json or Path("bench/results/prefix.json")
    report.write(path)
    print(f"\nrows in {path}")


def _ask_pair(system: System, prompts: Prompts) -> tuple[FirstToken, FirstToken]:
    prefix = prompts.of_length(PREFIX_TOKENS)
    first, second = (_ask(system, prefix + prompts.of_length(OWN_TOKENS)) for _ in range(2))
    return first, second


def _ask(system: System, prompt: list[int]) -> FirstToken:
    """One token is the whole answer, so the time to it is the time of the request."""
    body = {"model": system.model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    begin_s = time.perf_counter()
    answer = httpx.post(f"{system.url}/v1/completions", json=body, timeout=REQUEST_LIMIT_S).raise_for_status()
    ttft_ms = 1000 * (time.perf_counter() - begin_s)
    return FirstToken(ttft_ms, answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


if __name__ == "__main__":
    main()
