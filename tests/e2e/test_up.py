"""``pdserve up`` from start to stop: what it says, what it answers, and that it leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import openai
import psutil
import pytest

pytestmark = pytest.mark.e2e

LIMIT_S = 60.0  # generous: two busy cores may be all there is


class Up:
    def __init__(self, model: Path, log: Path, *flags: str) -> None:
        self._log = log
        command = [sys.executable, "-m", "pdserve", "up", "--port", "0", "--model", str(model), *flags]
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
        assert self._process.stdout is not None
        self.output = self._process.stdout
        self.children: dict[str, psutil.Process] = {}

    def wait_ready(self) -> str:
        """The URL."""
        for line in self.output:
            if found := re.search(r"ready at (http://\S+)", line):
                break
        else:
            raise AssertionError(f"it ended before it was ready:\n{self.log}")
        for child in psutil.Process(self._process.pid).children():
            role = next(part for part in child.cmdline() if part.startswith("pdserve_"))
            self.children[role] = child
        return found[1]

    @property
    def log(self) -> str:
        return self._log.read_text()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        """The exit code; nothing of it runs any more."""
        code = self._process.wait(LIMIT_S)
        _, alive = psutil.wait_procs(self.children.values(), timeout=LIMIT_S)
        assert alive == []
        return code

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for child in self.children.values():
            with suppress(psutil.NoSuchProcess):
                child.kill()
        self.output.close()


@contextmanager
def up(model: Path, folder: Path, *flags: str) -> Iterator[Up]:
    shared_before = set(os.listdir("/dev/shm"))
    running = Up(model, folder / "up.log", *flags)
    try:
        yield running
    finally:
        running.close()
    assert set(os.listdir("/dev/shm")) <= shared_before


def test_it_answers_a_streamed_request_and_stops_on_ctrl_c(model_folder: Path, tmp_path: Path) -> None:
    with up(model_folder, tmp_path) as running:
        url = running.wait_ready()
        assert set(running.children) == {"pdserve_prefill", "pdserve_decode", "pdserve_router"}
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=60) as client:
            stream = client.completions.create(
                model=model_folder.name, prompt="t5 t6 t7", max_tokens=8, stream=True
            )
            reasons = [chunk.choices[0].finish_reason for chunk in stream if chunk.choices]
        assert reasons[-1] in {"length", "stop"}
        running.signal(signal.SIGINT)
        assert running.wait() == 0
        assert "Traceback" not in running.log


def test_the_aggregated_server_answers_too_and_stops_on_sigterm(model_folder: Path, tmp_path: Path) -> None:
    with up(model_folder, tmp_path, "--prefill", "0") as running:
        url = running.wait_ready()
        assert set(running.children) == {"pdserve_decode", "pdserve_router"}
        body = {"model": model_folder.name, "prompt": "t5 t6 t7", "max_tokens": 3}
        response = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert response.json()["usage"]["completion_tokens"] == 3
        running.signal(signal.SIGTERM)
        assert running.wait() == 0


def test_a_lost_part_is_named_and_ends_the_rest(model_folder: Path, tmp_path: Path) -> None:
    with up(model_folder, tmp_path) as running:
        running.wait_ready()
        running.children["pdserve_decode"].kill()
        assert running.wait() == 1
        assert "decode-0 was killed by SIGKILL" in running.output.read()


def test_nothing_outlives_a_killed_parent(model_folder: Path, tmp_path: Path) -> None:
    with up(model_folder, tmp_path) as running:
        running.wait_ready()
        running.signal(signal.SIGKILL)
        assert running.wait() == -signal.SIGKILL


def test_it_can_be_stopped_while_it_starts(model_folder: Path, tmp_path: Path) -> None:
    with up(model_folder, tmp_path) as running:
        assert "starting" in running.output.readline()
        running.signal(signal.SIGHUP)
        assert running.wait() == 0


def test_a_part_that_cannot_start_is_named(model_folder: Path, tmp_path: Path) -> None:
    settings = tmp_path / "pdserve.toml"
    settings.write_text("[prefill]\nnum_blocks = 1\n")
    with up(model_folder, tmp_path, "--config", str(settings)) as running:
        assert running.wait() == 1
        assert "prefill-0 ended with exit code 2" in running.output.read()
        assert "prefill-0  | pdserve-prefill: num_blocks: Input should be" in running.log
        assert "Traceback" not in running.log


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--decode", "0"], "decode: Input should be greater than or equal to 1"),
        (["--model", "/nowhere"], "/nowhere: no such folder"),
        (["--log-level", "loud"], "log_level"),
    ],
)
def test_wrong_settings_end_with_code_2_and_one_line(
    model_folder: Path, tmp_path: Path, flags: list[str], complaint: str
) -> None:
    with up(model_folder, tmp_path, *flags) as running:
        assert running.wait() == 2
        assert complaint in running.log
        assert len(running.log.splitlines()) == 1
