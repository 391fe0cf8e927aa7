"""``scripts/bench engine``: decode and prefill of our engine beside what people would run instead.

The embedded model for all, full-precision arithmetic, the same number of threads, one process each.
They take turns case by case, so that all see the same machine; the roof is measured in the same run.
llama.cpp and vLLM's CPU build take part where ``scripts/bench peers --install`` has put them.

    decode_tokens_per_s    medians over steps of all turns; context is what each sequence has cached
    prefill_tokens_per_s   one prompt, to its first token; medians over turns
    ratio_to_roof          against the larger of bytes over memory speed and FLOPs over multiplier speed,
                           with fp16 weights and the KV dtype of ours

``--profile`` prints where our decode step spends its time instead.
"""

from __future__ import annotations

import cProfile
import json
import os
import pstats
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import peers, roofs
from bench.contenders import CONTENDERS, Pdserve
from bench.report import Labels, Report, arguments
from bench.roofs import ModelWork, Roofs
from pdserve.model.embedded import embedded_model_path

BATCHES, CONTEXTS, PROMPTS = (1, 8, 32), (512, 2048), (512, 2048)
QUICK_BATCHES, QUICK_CONTEXTS, QUICK_PROMPTS = (1, 8), (512,), (512,)
STEPS = 16
QUICK_STEPS = 6
# Sequences × context: beyond, a turn takes minutes, as the prompts have to be computed first.
MOST_KV_TOKENS = {"transformers": 16 << 10, "transformers-cb": 16 << 10}
ANSWER_LIMIT_S = 900.0


@dataclass(frozen=True, slots=True)
class Child:
    impl: str
    process: subprocess.Popen[str]

    def ask(self, **command: object) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Libraries print too: an answer is marked. A child that takes too long is killed."""
        assert self.process.stdout is not None
        watchdog = threading.Timer(ANSWER_LIMIT_S, self.process.kill)
        watchdog.start()
        try:
            for line in self.process.stdout:
                if line.startswith("answer "):
                    answer: dict[str, Any] = json.loads(line.removeprefix("answer "))
                    return answer
        finally:
            watchdog.cancel()
        raise RuntimeError(f"{self.impl} ended without an answer, or took over {ANSWER_LIMIT_S:g} s")


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    able = [*CONTENDERS, *peers.installed()]
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--impl", nargs="+", choices=able, default=able)
    parser.add_argument("--rounds", type=int, default=3, help="turns of everyone")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    if options.profile:
        _profile(options.threads[0])
        return
    report = Report("engine")
    for num_threads in options.threads:
        _compare(
            report,
            options.impl,
            num_threads,
            rounds=1 if options.quick else options.rounds,
            quick=options.quick,
        )
    report.print_table("threads", "batch", "context", "num_prompt_tokens", "impl")
    path = options.json or Path("bench/results/engine.json")
    report.write(path)
    _plot(report, path.with_suffix(".png"), options.threads[0])
    print(f"\nmedians; rows in {path}, plot beside it")


def _compare(report: Report, impls: list[str], num_threads: int, *, rounds: int, quick: bool) -> None:
    limit = roofs.measure(num_threads)
    report.add("memory_read_gb_s", limit.read_bytes_per_s / 1e9, "GB/s", threads=num_threads)
    report.add("gemm_gflop_s", limit.flops_per_s / 1e9, "GFLOP/s", threads=num_threads)
    with _children(impls, num_threads) as (children, work):
        for context in QUICK_CONTEXTS if quick else CONTEXTS:
            for batch in QUICK_BATCHES if quick else BATCHES:
                case: dict[str, int] = {
                    "batch": batch,
                    "context": context,
                    "steps": QUICK_STEPS if quick else STEPS,
                }
                able = {
                    name: child
                    for name, child in children.items()
                    if batch * context <= MOST_KV_TOKENS.get(name, batch * context)
                }
                times = _take_turns(able, rounds, run="decode", **case)
                _add_decode(report, times, limit, work, batch=batch, context=context, threads=num_threads)
        for num_tokens in QUICK_PROMPTS if quick else PROMPTS:
            times = _take_turns(children, rounds, run="prefill", num_tokens=num_tokens)
            _add_prefill(report, times, limit, work, num_tokens, num_threads)


def _take_turns(children: dict[str, Child], rounds: int, **command: object) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in children}
    for _ in range(rounds):
        for name, child in children.items():
            answer = child.ask(**command)
            times[name] += answer.get("step_s") or [answer["seconds"]]
    return times


def _add_decode(
    report: Report,
    times: dict[str, list[float]],
    limit: Roofs,
    work: ModelWork,
    *,
    batch: int,
    context: int,
    threads: int,
) -> None:
    least_s = limit.seconds(
        num_bytes=work.decode_bytes(batch=batch, context=context),
        flops=work.decode_flops(batch=batch, context=context),
    )
    for impl, own in times.items():
        step_s = statistics.median(own)
        labels: Labels = {"impl": impl, "batch": batch, "context": context, "threads": threads}
        report.add("decode_tokens_per_s", batch / step_s, "tok/s", **labels)
        report.add("step_ms", step_s * 1000, "ms", **labels)
        report.add("ratio_to_roof", least_s / step_s, "", **labels)


def _add_prefill(
    report: Report,
    times: dict[str, list[float]],
    limit: Roofs,
    work: ModelWork,
    num_tokens: int,
    threads: int,
) -> None:
    least_s = limit.seconds(num_bytes=work.weight_bytes, flops=work.prefill_flops(num_tokens))
    for impl, own in times.items():
        seconds = statistics.median(own)
        labels: Labels = {"impl": impl, "num_prompt_tokens": num_tokens, "threads": threads}
        report.add("prefill_tokens_per_s", num_tokens / seconds, "tok/s", **labels)
        report.add("ratio_to_roof", least_s / seconds, "", **labels)


@contextmanager
def _children(impls: list[str], num_threads: int) -> Iterator[tuple[dict[str, Child], ModelWork]]:
    """All of ``impls``, and ours in any case: it tells what the model has to do."""
    names = list(dict.fromkeys(["pdserve", *impls]))
    children = {name: _start(name, num_threads) for name in names}
    try:
        facts = {name: child.answer()["ready"] for name, child in children.items()}["pdserve"]
        num_parameters = facts["num_parameters"]
        yield (
            children,
            ModelWork(num_parameters, 2 * num_parameters, facts["kv_token_bytes"], facts["attention_width"]),
        )
    finally:
        for child in children.values():
            child.process.kill()
            child.process.communicate()


def _start(impl: str, num_threads: int) -> Child:
    command, environment = _command(impl, num_threads)
    process = subprocess.Popen(
        command,
        env=os.environ | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],  # where another project's Python finds this package
    )
    return Child(impl, process)


def _command(impl: str, num_threads: int) -> tuple[list[str], dict[str, str]]:
    """With what it needs in its environment."""
    match impl:
        case peers.VLLM_CPU:
            in_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # so that its steps are ours to time
            command = [peers.python(peers.VLLM_CPU), "-m", "bench.vllm_cpu", str(embedded_model_path())]
            return command, peers.vllm_environment(num_threads) | in_process
        case peers.LLAMA_CPP:
            return [sys.executable, "-m", "bench.llama_cpp", str(num_threads)], {}
        case _:
            return [sys.executable, "-m", "bench.contenders", impl, str(num_threads)], {}


def _profile(num_threads: int) -> None:
    """The profiler slows Python down and the kernels not at all: Python's shares are upper bounds."""
    import torch

    with torch.inference_mode():
        ours = Pdserve(num_threads)
        for batch in (1, 8, 32):
            ours.decode(batch=batch, context=512, steps=4)
            profiler = cProfile.Profile()
            profiler.enable()
            times = ours.decode(batch=batch, context=512, steps=STEPS)
            profiler.disable()
            print(f"\nbatch {batch}: {1000 * statistics.median(times):.1f} ms a step, profiled")
            pstats.Stats(profiler).sort_stats("tottime").print_stats(18)


def _plot(report: Report, path: Path, num_threads: int) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    _bars(left, report, "decode_tokens_per_s", ("batch", "context"), num_threads)
    left.set(title="decode", ylabel="tokens/s", xlabel="batch × context")
    _bars(right, report, "prefill_tokens_per_s", ("num_prompt_tokens",), num_threads)
    right.set(title="prefill", xlabel="prompt tokens")
    left.legend()
    figure.suptitle(f"SmolLM2-135M on {num_threads} CPU thread{'s' if num_threads > 1 else ''}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _bars(axes: Any, report: Report, metric: str, case_labels: tuple[str, ...], num_threads: int) -> None:
    rows = [row for row in report.rows if row.metric == metric and row.labels["threads"] == num_threads]
    cases = list(dict.fromkeys(tuple(row.labels[name] for name in case_labels) for row in rows))
    impls = list(dict.fromkeys(row.labels["impl"] for row in rows))
    width = 0.8 / len(impls)
    for index, impl in enumerate(impls):
        own = {
            tuple(row.labels[name] for name in case_labels): row.value
            for row in rows
            if row.labels["impl"] == impl
        }
        places = [place + index * width for place, case in enumerate(cases) if case in own]
        axes.bar(places, [own[case] for case in cases if case in own], width, label=str(impl))
    axes.set_xticks(
        [place + 0.4 - width / 2 for place in range(len(cases))],
        [" × ".join(map(str, case)) for case in cases],
    )
    axes.grid(axis="y", alpha=0.3)


if __name__ == "__main__":
    main()
