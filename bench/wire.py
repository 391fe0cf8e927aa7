"""``scripts/bench wire``: what KV that travels in fewer bytes changes in the answers after it.

Prompts of real text are computed exactly; their KV goes from one pool to another as it would over a link,
rounded; then the text goes on over it, and at each position the next-token distribution is compared with
the one over KV that is not rounded.

    bytes_per_token      on the wire; ratio_to_fp16: against KV of half floats
    mean_kl_nats         KL(exact ‖ rounded), mean over the positions after the prompts
    top1_agreement       share of those positions whose most likely token is the same
    converting_gb_s      of the pool's bytes, both ends one after the other, one thread
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Tensor

from bench import quality
from bench.report import Report, arguments
from pdserve.engine.build import BuiltEngine
from pdserve.kvcache.segment import Segment, WireDtype, WireOrder, wire_layout

PROMPT_TOKENS = 768
NUM_WINDOWS, QUICK_NUM_WINDOWS = 8, 1


@torch.inference_mode()
def main() -> None:
    options = arguments(__doc__.splitlines()[0]).parse_args()
    report = Report("wire")
    prefill, decode = (quality.built("fp32") for _ in range(2))
    windows = quality.windows(QUICK_NUM_WINDOWS if options.quick else NUM_WINDOWS)
    exact = []
    for window in windows:
        exact.append(quality.log_probabilities(prefill, window)[PROMPT_TOKENS:])
    for wire_dtype in WireDtype:
        _compare(report, prefill, decode, windows, exact, wire_dtype)
    report.print_table("wire_dtype")
    path = options.json or Path("bench/results/wire.json")
    report.write(path)
    num_positions = len(windows) * (quality.WINDOW_TOKENS - PROMPT_TOKENS)
    print(f"\n{num_positions} positions after prompts of {PROMPT_TOKENS} tokens; rows in {path}")


def _compare(
    report: Report,
    prefill: BuiltEngine,
    decode: BuiltEngine,
    windows: list[list[int]],
    exact: list[Tensor],
    wire_dtype: WireDtype,
) -> None:
    kl, agrees = [], []
    num_bytes, seconds = 0, 0.0
    for window, expected in zip(windows, exact, strict=True):
        quality.log_probabilities(prefill, window[:PROMPT_TOKENS])
        begin_s = time.perf_counter()
        num_bytes += _hand_over(prefill, decode, window[:PROMPT_TOKENS], wire_dtype)
        seconds += time.perf_counter() - begin_s
        got = quality.log_probabilities(decode, window, PROMPT_TOKENS)
        kl.append(quality.divergence(expected, got))
        agrees.append(expected.argmax(-1) == got.argmax(-1))
    name = wire_dtype.name.lower()
    layout = prefill.storage.layout
    half = wire_layout(layout, WireDtype.FLOAT16).token_bytes
    on_wire = wire_layout(layout, wire_dtype).token_bytes
    report.add("bytes_per_token", on_wire, "B", wire_dtype=name)
    report.add("ratio_to_fp16", on_wire / half, "", wire_dtype=name)
    report.add("mean_kl_nats", float(torch.cat(kl).mean()), "nat", wire_dtype=name)
    report.add("top1_agreement", float(torch.cat(agrees).float().mean()), "", wire_dtype=name)
    report.add("converting_gb_s", num_bytes / seconds / 1e9, "GB/s", wire_dtype=name)


def _hand_over(prefill: BuiltEngine, decode: BuiltEngine, prompt: list[int], wire_dtype: WireDtype) -> int:
    """As sender and receiver do, without the link between them. The bytes that it had in the pool."""
    layout = prefill.storage.layout
    table = quality.blocks_of(prefill, prompt)
    whole = Segment(0, layout.num_layers, 0, layout.num_kv_heads, 0, len(prompt))
    if wire_dtype is WireDtype.SAME:
        payload = prefill.storage.outgoing(whole, table, WireOrder.TOKEN)
        landing = decode.storage.incoming(whole, table, WireOrder.TOKEN)
    else:
        payload = prefill.storage.outgoing_converted(whole, table, wire_dtype)
        landing = decode.storage.incoming_converted(whole, table, wire_dtype)
    content = memoryview(bytearray(payload.num_bytes))
    payload.gather(0, content)
    landing.payload.scatter(0, content)
    landing.finish()
    return whole.payload_bytes(layout, WireOrder.TOKEN)


if __name__ == "__main__":
    main()
