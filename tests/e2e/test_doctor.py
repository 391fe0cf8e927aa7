"""``pdserve doctor`` names what is wrong with real deployments, each broken in one way, and with a host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.support.model_folder import save_model_folder
from tests.support.processes import (
    SECRET,
    START_LIMIT_S,
    Processes,
    Program,
    eventually,
    free_port,
    open_processes,
)
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.e2e

LIMIT_S = 90.0
NVIDIA_SMI = "#!/bin/sh\necho '0, NVIDIA H200, 143771, 1'\necho '1, NVIDIA H200, 143771, 1'\n"
IN_SMALL_SHARED_MEMORY = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'


@pytest.fixture(scope="module")
def running(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with open_processes(model_folder, tmp_path_factory.mktemp("logs")) as running:
        yield running


@pytest.fixture
def deployment(running: Processes) -> Processes:
    """Whole again, whatever the test before has done to it."""
    running.wait_ready()
    return running


class Diagnosis:
    def __init__(self, *flags: str, before: tuple[str, ...] = (), **environment: str) -> None:
        command = [*before, sys.executable, "-m", "pdserve", "doctor", "--json", *flags]
        done = subprocess.run(
            command,
            env={**os.environ, "PDSERVE_SECRET": SECRET, **environment},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        self.exit_status = done.returncode
        assert done.stdout, done.stderr
        self.findings: list[dict[str, Any]] = json.loads(done.stdout)["findings"]

    def of(self, severity: str) -> str:
        found = [finding for finding in self.findings if finding["severity"] == severity]
        return "\n".join(f"{finding['what']}: {finding['why']}" for finding in found)


@contextmanager
def replaced(program: Program, **changes: Any) -> Iterator[Program]:
    """Another program in its place, which serves."""
    program.kill()
    other = replace(program, **changes)
    other.start()
    try:
        eventually(lambda: serves(other), START_LIMIT_S)
        yield other
    finally:
        other.kill()
        program.start()


def serves(program: Program) -> bool:
    with suppress(grpc.RpcError):
        program.status()
        return True
    return False


def test_a_sound_deployment_has_no_fault_and_a_measured_link(deployment: Processes) -> None:
    diagnosis = Diagnosis("--url", deployment.url)
    assert diagnosis.exit_status == 0
    assert diagnosis.of("fault") == ""
    prefill, decode = deployment.prefill[0], deployment.decode[0]
    assert f"a request gets through prefill {prefill.address} → decode {decode.address}" in diagnosis.of("ok")
    assert "KV for 512 tokens" in "".join(finding["why"] for finding in diagnosis.findings)
    deployment.assert_blocks_come_back()


def test_a_wrong_model_on_one_side_is_named(deployment: Processes, tmp_path: Path) -> None:
    other = save_model_folder(tiny_model("llama", seed=1, max_context_tokens=4096), tmp_path / "other")
    decode = deployment.decode[0]
    flags = [str(other) if flag == str(deployment.model) else flag for flag in decode.flags]
    with replaced(decode, flags=flags):
        deployment.wait_ready()
        diagnosis = Diagnosis("--url", deployment.url)
    assert diagnosis.exit_status == 1
    assert "the workers do not all have the same model" in diagnosis.of("fault")
    assert f"decode worker {decode.address}: other" in diagnosis.of("fault")
    assert "no request gets through" in diagnosis.of("fault")


def test_a_closed_port_is_named(deployment: Processes) -> None:
    decode = deployment.decode[0]
    with replaced(decode, port=free_port()):
        diagnosis = Diagnosis("--url", deployment.url)
    assert diagnosis.exit_status == 1
    assert f"decode worker {decode.address} is down: the port is closed" in diagnosis.of("fault")


def test_prefill_being_down_is_named(deployment: Processes) -> None:
    prefill = deployment.prefill[0]
    prefill.kill()
    try:
        diagnosis = Diagnosis("--url", deployment.url)
    finally:
        prefill.start()
    assert diagnosis.exit_status == 1
    assert f"prefill worker {prefill.address} is down" in diagnosis.of("fault")
    assert "prefill is down" in diagnosis.of("slow")


def test_clocks_apart_are_named_and_shown_to_break_the_handoff(deployment: Processes) -> None:
    decode = deployment.decode[0]
    with replaced(decode, module="tests.support.decode_an_hour_ahead"):
        deployment.wait_ready()
        diagnosis = Diagnosis("--url", deployment.url)
    assert diagnosis.exit_status == 1
    assert f"the clock of decode worker {decode.address} is 3600 s ahead" in diagnosis.of("fault")
    assert "no request gets through" in diagnosis.of("fault")


def test_another_secret_is_named_and_the_rest_is_still_checked(deployment: Processes) -> None:
    diagnosis = Diagnosis("--url", deployment.url, PDSERVE_SECRET="another")
    assert diagnosis.exit_status == 1
    assert "refuse the doctor's secret" in diagnosis.of("fault")
    assert f"decode worker {deployment.decode[0].address} is up" in diagnosis.of("ok")


def test_a_router_that_does_not_run_is_named() -> None:
    diagnosis = Diagnosis("--url", f"http://127.0.0.1:{free_port()}")
    assert diagnosis.exit_status == 1
    assert "cannot be asked: the port is closed" in diagnosis.of("fault")


def test_shared_memory_too_small_for_the_gpus_of_a_host_is_named(tmp_path: Path) -> None:
    """A real file system of the size that containers get, in a mount namespace of its own."""
    before = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", IN_SMALL_SHARED_MEMORY, "sh")
    if subprocess.run([*before, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine lets nobody mount in a namespace (unshare --user --mount)")
    driver = tmp_path / "nvidia-smi"
    driver.write_text(NVIDIA_SMI)
    driver.chmod(0o755)
    diagnosis = Diagnosis(before=before, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert diagnosis.exit_status == 1
    assert "/dev/shm is too small for NCCL: 64 MiB" in diagnosis.of("fault")
    assert "2 GPUs" in diagnosis.of("ok")


@pytest.mark.parametrize("flags", [["--url", "ftp://nowhere"], ["--model", "/nowhere"], ["--unknown"]])
def test_wrong_usage_ends_with_status_2(flags: list[str]) -> None:
    command = [sys.executable, "-m", "pdserve", "doctor", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
