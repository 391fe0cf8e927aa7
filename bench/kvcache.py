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
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from bench.contenders import Pdserve
from bench.report import Report, arguments
from pdserve.engine.batch import PackedBatch
from pdserve.engine.build import BuiltEngine, assemble
from pdserve.engine.config import EngineConfig, KVCacheDtype
from pdserve.engine.scheduler import Chunk, StepPlan
from pdserve.engine.sequence import Sequence
from pdserve.model.attention.kernel import KernelAttention
from pdserve.model.cpu_threads import CpuThreads
from pdserve.model.embedded import embedded_model_path
from pdserve.model.loader import load_model
from pdserve.sampling import SamplingParams

KV_DTYPES: tuple[KVCacheDtype, ...] = ("fp32", "fp16", "bf16", "int8", "fp8")
EXACT: KVCacheDtype = "fp32"
HALF: KVCacheDtype = "fp16"
ROOT = Path(__file__).parents[1]
TEXT = ("LICENSE", "README.md", "docs/architecture.md", "docs/protocol.md")
WINDOW_TOKENS, CHUNK_TOKENS = 1024, 128
NUM_WINDOWS, QUICK_NUM_WINDOWS = 6, 1
BATCH, CONTEXT, STEPS, ROUNDS = 8, 2048, 12, 3


@torch.inference_mode()
def main() -> None:
    options = arguments(__doc__.splitlines()[0]).parse_args()
    report = Report("kvcache")
    windows = _windows(QUICK_NUM_WINDOWS if options.quick else NUM_WINDOWS)
    _compare_answers(report, windows)
    _compare_speed(report, rounds=1 if options.quick else ROUNDS)
    report.print_table("kv_dtype")
    path = options.json or ROOT / "bench/results/kvcache.json"
    report.write(path)
    print(f"\n{len(windows) * WINDOW_TOKENS} positions of {', '.join(TEXT)}; rows in {path}")


def _windows(count: int) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(embedded_model_path() / "tokenizer.json"))
    text = "\n".join((ROOT / name).read_text() for name in TEXT)
    token_ids: list[int] = tokenizer.encode(text).ids
    windows = [token_ids[begin : begin + WINDOW_TOKENS] for begin in range(0, len(token_ids), WINDOW_TOKENS)]
    return [window for window in windows if len(window) == WINDOW_TOKENS][:count]


def _compare_answers(report: Report, windows: list[list[int]]) -> None:
    built = {name: _built(name) for name in KV_DTYPES}
    kl: dict[str, list[Tensor]] = {name: [] for name in KV_DTYPES}
    agrees: dict[str, list[Tensor]] = {name: [] for name in KV_DTYPES}
    for window in windows:
        exact = _log_probabilities(built[EXACT], window)
        for name in KV_DTYPES:
            rounded = _log_probabilities(built[name], window)
            kl[name].append((exact.exp() * (exact - rounded)).sum(-1))
            agrees[name].append(exact.argmax(-1) == rounded.argmax(-1))
    half_bytes = built[HALF].storage.layout.token_bytes
    for name in KV_DTYPES:
        num_bytes = built[name].storage.layout.token_bytes
        report.add("kv_token_bytes", num_bytes, "B", kv_dtype=name)
        report.add("ratio_to_fp16_bytes", num_bytes / half_bytes, "", kv_dtype=name)
        report.add("mean_kl_nats", float(torch.cat(kl[name]).mean()), "nat", kv_dtype=name)
        report.add("top1_agreement", float(torch.cat(agrees[name]).float().mean()), "", kv_dtype=name)


def _built(kv_dtype: KVCacheDtype) -> BuiltEngine:
    config = EngineConfig(kv_cache_bytes=128 << 20, kv_cache_dtype=kv_dtype, weight_dtype="fp32")
    return assemble(load_model(embedded_model_path()), config)


def _log_probabilities(built: BuiltEngine, token_ids: list[int]) -> Tensor:
    """[tokens, vocabulary], every position reading the KV of those before it out of the pool."""
    layout = built.storage.layout
    blocks = list(range(1, layout.num_blocks_for(len(token_ids)) + 1))
    sequence = Sequence("text", token_ids, SamplingParams(max_tokens=1), block_table=blocks)
    backend = KernelAttention(built.storage, CpuThreads(1))
    logits = []
    for chunk in _chunks(sequence):
        batch = PackedBatch(
            StepPlan((chunk,)),
            block_size=layout.block_size,
            backend=backend,
            on_boundary=lambda: None,
            on_layer_written=lambda layer: None,
        )
        output = built.loaded.model(
            input_ids=batch.token_ids, position_ids=batch.positions, use_cache=False, paged_batch=batch
        )
        logits.append(output.logits[0].float())
    return torch.cat(logits).log_softmax(-1)


def _chunks(sequence: Sequence) -> Iterator[Chunk]:
    for begin in range(0, WINDOW_TOKENS, CHUNK_TOKENS):
        yield Chunk(sequence, begin, CHUNK_TOKENS)


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
