"""``scripts/bench kvcache``: what storing KV in fewer bytes changes, in answers, memory and speed.

The same text goes through the embedded model once for each KV type, chunk by chunk as a worker would; at
each position the next-token distribution is compared with the one over KV that is not rounded.

    kv_token_bytes   of one token over all layers
    mean_kl_nats     KL(exact ‖ rounded), mean over positions
    top1_agreement   share of positions whose most likely token is the same
    step_ms          a decode step, 8 sequences of 2,048 tokens; all types in turns
"""

from __future__ import annotations

import statistics
from pathlib import Path

import torch
from torch import Tensor

from bench import quality
from bench.contenders import Pdserve
from bench.report import Report, arguments
from pdserve.engine.config import KVCacheDtype

KV_DTYPES: tuple[KVCacheDtype, ...] = ("fp32", "fp16", "bf16", "int8", "fp8")
EXACT: KVCacheDtype = "fp32"
HALF: KVCacheDtype = "fp16"
NUM_WINDOWS, QUICK_NUM_WINDOWS = 6, 1
BATCH, CONTEXT, STEPS, ROUNDS = 8, 2048, 12, 3


@torch.inference_mode()
def main() -> None:
    options = arguments(__doc__.splitlines()[0]).parse_args()
    report = Report("kvcache")
    windows = quality.windows(QUICK_NUM_WINDOWS if options.quick else NUM_WINDOWS)
    _compare_answers(report, windows)
    _compare_speed(report, rounds=1 if options.quick else ROUNDS)
    report.print_table("kv_dtype")
    path = options.json or Path("bench/results/kvcache.json")
    report.write(path)
    print(f"\n{sum(map(len, windows))} positions of {', '.join(quality.TEXT)}; rows in {path}")


def _compare_answers(report: Report, windows: list[list[int]]) -> None:
    built = {name: quality.built(name) for name in KV_DTYPES}
    kl: dict[str, list[Tensor]] = {name: [] for name in KV_DTYPES}
    agrees: dict[str, list[Tensor]] = {name: [] for name in KV_DTYPES}
    for window in windows:
        exact = quality.log_probabilities(built[EXACT], window)
        for name in KV_DTYPES:
            rounded = quality.log_probabilities(built[name], window)
            kl[name].append(quality.divergence(exact, rounded))
            agrees[name].append(exact.argmax(-1) == rounded.argmax(-1))
    half_bytes = built[HALF].storage.layout.token_bytes
    for name in KV_DTYPES:
        num_bytes = built[name].storage.layout.token_bytes
        report.add("kv_token_bytes", num_bytes, "B", kv_dtype=name)
        report.add("ratio_to_fp16_bytes", num_bytes / half_bytes, "", kv_dtype=name)
        report.add("mean_kl_nats", float(torch.cat(kl[name]).mean()), "nat", kv_dtype=name)
        report.add("top1_agreement", float(torch.cat(agrees[name]).float().mean()), "", kv_dtype=name)


def _compare_speed(report: Report, *, rounds: int) -> None:
    engines = {name: Pdserve(1, name, 1 << 30) for name in KV_DTYPES}
    times: dict[KVCacheDtype, list[float]] = {name: [] for name in KV_DTYPES}
    for _ in range(rounds):
        for name, engine in engines.items():
            times[name] += engine.decode(batch=BATCH, context=CONTEXT, steps=STEPS)
    half_s = statistics.median(times[HALF])
    for name in KV_DTYPES:
        step_s = statistics.median(times[name])
        report.add("step_ms", 1000 * step_s, "ms", kv_dtype=name)
        report.add("ratio_to_fp16_step", step_s / half_s, "", kv_dtype=name)


if __name__ == "__main__":
    main()
