"""``scripts/bench growth``: what a decode step costs as contexts and batches grow.

    step_ms      medians; KV of the whole context is there before the clock starts
    us_per_kv_token   of what is added from the previous case on the line: flat where bytes are the cost

A knee, where more tokens suddenly cost more each, would be work that is not the kernels'.
"""

from __future__ import annotations

import statistics
from itertools import pairwise
from pathlib import Path

import torch

from bench.contenders import Pdserve
from bench.report import Report, arguments

CONTEXTS = (512, 1024, 2048, 4096, 8128)  # the last leaves room for the steps
BATCHES = (1, 2, 4, 8, 16, 32, 64)
QUICK_CONTEXTS, QUICK_BATCHES = (512, 2048), (1, 8)
BATCHES_OF_CONTEXTS, CONTEXT_OF_BATCHES = (1, 4), 512
STEPS, ROUNDS = 12, 3


@torch.inference_mode()
def main() -> None:
    options = arguments(__doc__.splitlines()[0]).parse_args()
    contexts, batches = (QUICK_CONTEXTS, QUICK_BATCHES) if options.quick else (CONTEXTS, BATCHES)
    lines = {
        f"batch {batch}": [(batch, context) for context in contexts] for batch in BATCHES_OF_CONTEXTS
    } | {f"context {CONTEXT_OF_BATCHES}": [(batch, CONTEXT_OF_BATCHES) for batch in batches]}
    report = Report("growth")
    ours = Pdserve(1)
    step_s = _measure(
        ours, {case for line in lines.values() for case in line}, 1 if options.quick else ROUNDS
    )
    for name, line in lines.items():
        for batch, context in line:
            report.add(
                "step_ms", 1000 * step_s[batch, context], "ms", line=name, batch=batch, context=context
            )
        for before, case in pairwise(line):
            num_added = case[0] * case[1] - before[0] * before[1]
            added_us = 1e6 * (step_s[case] - step_s[before]) / num_added
            report.add("us_per_kv_token", added_us, "us", line=name, batch=case[0], context=case[1])
    report.print_table("line", "batch", "context")
    path = options.json or Path("bench/results/growth.json")
    report.write(path)
    _plot(report, list(lines), path.with_suffix(".png"))
    print(f"\nmedians, one thread; rows in {path}, plot beside it")


def _measure(ours: Pdserve, cases: set[tuple[int, int]], rounds: int) -> dict[tuple[int, int], float]:
    """All cases in turns, so that a machine that slows down slows all of them."""
    times: dict[tuple[int, int], list[float]] = {case: [] for case in sorted(cases)}
    for _ in range(rounds):
        for batch, context in times:
            times[batch, context] += ours.decode(batch=batch, context=context, steps=STEPS)
    return {case: statistics.median(own) for case, own in times.items()}


def _plot(report: Report, lines: list[str], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    for name in lines:
        rows = [row for row in report.rows if row.metric == "step_ms" and row.labels["line"] == name]
        axes, label = (left, "context") if name.startswith("batch") else (right, "batch")
        axes.plot([int(row.labels[label]) for row in rows], [row.value for row in rows], "o-", label=name)
    for axes, label in ((left, "context, tokens"), (right, "batch, sequences")):
        axes.set(xlabel=label, ylabel="decode step, ms", xlim=(0, None), ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle("SmolLM2-135M on 1 CPU thread")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
