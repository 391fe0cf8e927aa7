"""Whole servers with an OpenAI API, ours and others', each on the same cores, started side by side."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from bench import peers
from bench.systems import System, started
from pdserve.model.embedded import EMBEDDED_NAME, embedded_model_path

OURS = "pdserve"
START_LIMIT_S = 900.0  # vLLM compiles for minutes the first time


@contextmanager
def servers(num_threads: int, *, num_streams: int, context: int) -> Iterator[dict[str, System]]:
    """Ours as ``num_threads`` aggregated workers of one thread; the others as one process of as many."""
    ports = {name: _free_port() for name in peers.installed()}
    processes = {
        name: _start(name, port, num_threads, num_streams=num_streams, context=context)
        for name, port in ports.items()
    }
    ours = ("--prefill", "0", "--decode", str(num_threads), "--threads", "1")
    try:
        with started({OURS: ours}) as systems:
            for name, port in ports.items():
                _wait_until_healthy(processes[name], port)
                systems[name] = System(f"http://127.0.0.1:{port}", EMBEDDED_NAME, processes[name].pid)
            yield systems
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            process.wait(timeout=60)


def _start(
    name: str, port: int, num_threads: int, *, num_streams: int, context: int
) -> subprocess.Popen[bytes]:
    if name == peers.LLAMA_CPP:
        command = _llama_command(port, num_threads, num_streams, context)
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    command = [peers.python(peers.VLLM_CPU), "-m", "vllm.entrypoints.openai.api_server"]
    flags = {
        "--model": str(embedded_model_path()),
        "--served-model-name": EMBEDDED_NAME,
        "--dtype": "float32",
        "--max-model-len": str(context),
        "--max-num-seqs": str(num_streams),
        "--host": "127.0.0.1",
        "--port": str(port),
    }
    command += [part for flag in flags.items() for part in flag]
    environment = os.environ | peers.vllm_environment(num_threads)
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _llama_command(port: int, num_threads: int, num_streams: int, context: int) -> list[str]:
    flags = {
        "-m": str(peers.f16_gguf_path()),
        "-t": str(num_threads),
        "-tb": str(num_threads),
        "-np": str(num_streams),
        "-c": str(num_streams * context),
        "--host": "127.0.0.1",
        "--port": str(port),
    }
    return [peers.llama_program("llama-server"), *(part for flag in flags.items() for part in flag)]


def _wait_until_healthy(process: subprocess.Popen[bytes], port: int) -> None:
    deadline_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise SystemExit(f"a server ended with {process.returncode}: {process.args!r}")
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).is_success:
                return
        except httpx.TransportError:
            pass  # it does not listen yet
        time.sleep(0.5)
    raise SystemExit(f"a server was not ready within {START_LIMIT_S:g} s: {process.args!r}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
