"""The programs as real processes on loopback, each on a port it gets again after a restart."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import httpx

from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.rpc.v1 import worker_pb2_grpc as pb_grpc

START_LIMIT_S = 180.0  # all compile their kernels at once, on few cores
SECRET = "of the test"


@dataclass
class Program:
    module: str
    flags: list[str]
    port: int
    log: Path
    metrics_port: int = 0  # 0: none of its own
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self.process is not None, f"{self.module} is not running"
        return self.process.pid

    def start(self) -> None:
        environment = {**os.environ, "PDSERVE_SECRET": SECRET, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", self.module, "--port", str(self.port), *self.flags]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait(10)
            self.process = None

    def status(self, *, check_integrity: bool = False) -> pb.WorkerStatus:
        with grpc.insecure_channel(self.address) as channel:
            request = pb.GetStatusRequest(check_integrity=check_integrity)
            status: pb.WorkerStatus = pb_grpc.WorkerStub(channel).GetStatus(request, timeout=5)
            return status


@dataclass
class Processes:
    """One of each, ready to serve."""

    model: Path
    router: Program
    prefill: list[Program]
    decode: list[Program]
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=60))

    @property
    def url(self) -> str:
        return f"http://{self.router.address}"

    @property
    def workers(self) -> list[Program]:
        return [*self.prefill, *self.decode]

    def wait_ready(self, limit_s: float = START_LIMIT_S) -> None:
        def is_ready() -> bool:
            with suppress(httpx.TransportError):
                return self.client.get(f"{self.url}/ready").status_code == httpx.codes.OK
            return False

        eventually(is_ready, limit_s)

    def complete(self, prompt: str | list[int], **fields: object) -> httpx.Response:
        body = {"model": self.model.name, "prompt": prompt, "temperature": 0, **fields}
        return self.client.post(f"{self.url}/v1/completions", json=body)

    def text(self, prompt: str | list[int], **fields: object) -> str:
        response = self.complete(prompt, **fields)
        assert response.status_code == httpx.codes.OK, response.text
        text: str = response.json()["choices"][0]["text"]
        return text

    def assert_blocks_come_back(self, limit_s: float = 0.25) -> None:
        """The leak check, through each worker's own account of itself."""

        def is_empty(program: Program) -> bool:
            status = program.status()
            return not (
                status.num_owned_blocks or status.num_running or status.num_waiting or status.num_reserved
            )

        eventually(lambda: all(map(is_empty, self.workers)), limit_s + 0.25)
        for program in self.workers:
            program.status(check_integrity=True)


@contextmanager
def open_processes(
    model: Path, logs: Path, *, num_prefill: int = 1, num_decode: int = 1, router_flags: tuple[str, ...] = ()
) -> Iterator[Processes]:
    def worker(role: str, index: int) -> Program:
        metrics_port = free_port()
        flags = ["--model", str(model), "--num-blocks", "600", "--block-size", "8"]
        flags += ["--metrics-port", str(metrics_port)]
        return Program(f"pdserve_{role}", flags, free_port(), logs / f"{role}-{index}.log", metrics_port)

    prefill = [worker("prefill", index) for index in range(num_prefill)]
    decode = [worker("decode", index) for index in range(num_decode)]
    decode_addresses = ",".join(program.address for program in decode)
    flags = [*router_flags, "--model", str(model), "--decode-workers", decode_addresses]
    if prefill:
        flags += ["--prefill-workers", ",".join(program.address for program in prefill)]
    router = Program("pdserve_router", flags, free_port(), logs / "router.log")
    programs = [*prefill, *decode, router]
    try:
        for program in programs:
            program.start()
        processes = Processes(model, router, prefill, decode)
        processes.wait_ready()
        yield processes
        processes.client.close()
    finally:
        for program in programs:
            program.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def eventually(condition: Callable[[], bool], limit_s: float) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, f"did not happen within {limit_s:g} s"
        time.sleep(0.01)
