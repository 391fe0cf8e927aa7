"""``scripts/bench handoff``: what disaggregation costs and gains, beside the aggregated server.

Two systems run at once on the same cores, each asked in turn while the other is idle:

    pd           1 prefill worker + 1 decode worker, one thread each
    aggregated   2 decode workers that prefill too, one thread each

The second part (without --quick) streams one answer while long prompts keep arriving: the
inter-token latency under prefill load, which is what disaggregation is for.
"""

from __future__ import annotations

import statistics
import threading
from pathlib import Path

from bench.report import Report, arguments
from bench.systems import Prompts, System, TimedAnswer, ask, started

# How often each prompt length is asked.
REPEATS = {128: 7, 512: 7, 2048: 3}
QUICK_REPEATS = {128: 1, 512: 1, 2048: 1}
OUTPUT_TOKENS = 24
QUICK_OUTPUT_TOKENS = 6
LOADED_OUTPUT_TOKENS = 96
LOAD_PROMPT_TOKENS = 768
MODES = {"pd": ("--prefill", "1", "--decode", "1"), "aggregated": ("--prefill", "0", "--decode", "2")}


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--transport", default="tcp", help="for the KV: tcp or grpc")
    options = parser.parse_args()
    report = Report("handoff")
    extra = ("--threads", "1", "--transports", options.transport)
    with started({mode: (*flags, *extra) for mode, flags in MODES.items()}) as systems:
        if options.quick:
            _idle(report, systems, QUICK_REPEATS, QUICK_OUTPUT_TOKENS, transport=options.transport)
        else:
            _idle(report, systems, REPEATS, OUTPUT_TOKENS, transport=options.transport)
            _loaded(report, systems, transport=options.transport)
    report.print_table("mode", "transport", "num_prompt_tokens", "load")
    path = options.json or Path("bench/results/handoff.json")
    report.write(path)
    print(f"\nmedians; rows in {path}")


def _idle(
    report: Report, systems: dict[str, System], repeats: dict[int, int], max_tokens: int, *, transport: str
) -> None:
    prompts = Prompts()
    for system in systems.values():
        ask(system, prompts.of_length(64), max_tokens=4)  # opens links, touches pages
    for length, count in repeats.items():
        answers: dict[str, list[TimedAnswer]] = {mode: [] for mode in systems}
        for _ in range(count):
            for mode, system in systems.items():
                answers[mode].append(ask(system, prompts.of_length(length), max_tokens=max_tokens))
        for mode, own in answers.items():
            _add(report, own, mode=mode, transport=transport, num_prompt_tokens=length, load="idle")


def _loaded(report: Report, systems: dict[str, System], *, transport: str) -> None:
    """One stream beside a client that sends long prompts one after the other."""
    prompts = Prompts()
    for mode, system in systems.items():
        stop = threading.Event()
        load = threading.Thread(target=_keep_prefilling, args=(system, stop))
        load.start()
        answers = [ask(system, prompts.of_length(128), max_tokens=LOADED_OUTPUT_TOKENS) for _ in range(2)]
        stop.set()
        load.join()
        _add(report, answers, mode=mode, transport=transport, num_prompt_tokens=128, load="long prompts")


def _keep_prefilling(system: System, stop: threading.Event) -> None:
    prompts = Prompts()
    while not stop.is_set():
        ask(system, prompts.of_length(LOAD_PROMPT_TOKENS), max_tokens=2)


def _add(report: Report, answers: list[TimedAnswer], **labels: str | int) -> None:
    itls = sorted(itl for answer in answers for itl in answer.itls_ms)
    report.add("ttft_ms", statistics.median(answer.ttft_ms for answer in answers), "ms", **labels)
    report.add("handoff_gap_ms", statistics.median(answer.gap_ms for answer in answers), "ms", **labels)
    report.add("itl_p50_ms", statistics.median(itls), "ms", **labels)
    report.add("itl_p99_ms", itls[min(len(itls) - 1, round(0.99 * len(itls)))], "ms", **labels)
    timings = [answer.timing for answer in answers if answer.timing.get("transfer_ms")]
    if timings:
        report.add("num_bytes", statistics.median(timing["num_bytes"] for timing in timings), "B", **labels)
        report.add(
            "transfer_ms", statistics.median(timing["transfer_ms"] for timing in timings), "ms", **labels
        )
        shares = [timing["hidden_transfer_ms"] / timing["transfer_ms"] for timing in timings]
        report.add("hidden_share", statistics.median(shares), "", **labels)


if __name__ == "__main__":
    main()
