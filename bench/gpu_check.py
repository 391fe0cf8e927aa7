"""``scripts/gpu-check``: everything here that needs a GPU, in one command, into one JSON file.

Works from the source tree without installing anything and without a network. A part that cannot run says
why in the report and does not stop the others; the exit status is 0 when no part failed.

    roofs    what the device's memory, multiplier and bus do at best
    tests    pytest -m gpu
    engine   decode steps and a prompt of a model with random weights, beside the roofs
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

ROOT = Path(__file__).parents[1]
TESTS_LIMIT_S = 300.0
COPY_BYTES = 1 << 30
GEMM_SIZE = 8192
BATCHES, CONTEXT, PROMPT_TOKENS, STEPS = (1, 8, 32), 512, 2048, 20

Part = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", default=Path("bench/results/gpu.json"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit(f"gpu-check: torch {torch.__version__} sees no GPU")
    report = {"machine": _machine()}
    for name, run in (("roofs", _roofs), ("tests", _tests), ("engine", _engine)):
        report[name] = _reported(run)
        print(f"{name}: {json.dumps(report[name])}", flush=True)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"report in {options.json}")
    sys.exit(any(part.get("status") == "failed" for part in report.values()))


def _reported(run: Callable[[], Part]) -> Part:
    try:
        return {"status": "ok"} | run()
    except ImportError as error:
        return {"status": "skipped", "reason": str(error)}
    except (RuntimeError, AssertionError, subprocess.SubprocessError) as error:
        return {"status": "failed", "reason": f"{type(error).__name__}: {error}"}


def _machine() -> Part:
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "num_gpus": torch.cuda.device_count(),
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def _roofs() -> Part:
    block = torch.empty(COPY_BYTES // 2, dtype=torch.bfloat16, device="cuda").normal_()
    other, host = torch.empty_like(block), torch.empty(block.shape, dtype=block.dtype, pin_memory=True)
    gb = COPY_BYTES / 1e9
    return {
        "memory_copy_gb_s": 2 * gb / _least_s(lambda: other.copy_(block)),
        "to_device_gb_s": gb / _least_s(lambda: block.copy_(host, non_blocking=True)),
        "to_host_gb_s": gb / _least_s(lambda: host.copy_(block, non_blocking=True)),
        "gemm_tflop_s": {str(dtype).removeprefix("torch."): _gemm_tflop_s(dtype) for dtype in _GEMM_DTYPES},
    }


_GEMM_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _gemm_tflop_s(dtype: torch.dtype) -> float:
    left, right = (torch.randn(GEMM_SIZE, GEMM_SIZE, device="cuda").to(dtype) for _ in range(2))
    return 2 * GEMM_SIZE**3 / _least_s(lambda: left @ right) / 1e12


def _least_s(run: Callable[[], object], repeats: int = 10) -> float:
    """Best of some: a roof is not a median."""
    run()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times)


def _tests() -> Part:
    import pytest  # noqa: F401  the child needs it; without it this part is skipped

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu", f"--junitxml={file}"]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=TESTS_LIMIT_S, check=False
        )
        assert file.exists(), done.stdout[-2000:] + done.stderr[-2000:]
        suite = next(ElementTree.parse(file).iter("testsuite"))
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    is_broken = counts["failures"] + counts["errors"] > 0
    outcome: Part = {"status": "failed", "output": done.stdout[-4000:]} if is_broken else {}
    return counts | outcome


@torch.inference_mode()
def _engine() -> Part:
    from transformers import AutoModelForCausalLM, LlamaConfig

    from pdserve.engine.build import assemble
    from pdserve.engine.config import EngineConfig
    from pdserve.model.vet import vet_model

    shape = LlamaConfig(
        num_hidden_layers=16,
        hidden_size=2048,
        intermediate_size=8192,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32_000,
        max_position_embeddings=4096,
    )
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16, attn_implementation="eager").eval()
    weight_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    config = EngineConfig(device="cuda", kv_cache_bytes=8 << 30, block_size=256, enable_prefix_cache=False)
    built = assemble(vet_model(model), config)
    steps = {str(batch): 1000 * _decode_step_s(built.engine, batch) for batch in BATCHES}
    begin = time.perf_counter()
    _run(built.engine, 1, PROMPT_TOKENS, 1)
    prompt_s = time.perf_counter() - begin
    return {
        "weight_gb": weight_bytes / 1e9,
        "decode_step_ms_by_batch": steps,
        "prefill_tokens_per_s": PROMPT_TOKENS / prompt_s,
    }


def _decode_step_s(engine: Any, batch: int) -> float:
    times = _run(engine, batch, CONTEXT, STEPS)
    return statistics.median(times[-STEPS // 2 :])


def _run(engine: Any, batch: int, num_tokens: int, max_tokens: int) -> list[float]:
    """Seconds of each step, prompts included; the sampled tokens reach the host in each."""
    from pdserve.engine.sequence import Sequence
    from pdserve.sampling import SamplingParams

    for index in range(batch):
        prompt = [(31 * index + position) % 32_000 for position in range(num_tokens)]
        engine.add(Sequence(f"s{index}", prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True)))
    times = []
    while engine.has_work:
        begin = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - begin)
    return times


if __name__ == "__main__":
    main()
