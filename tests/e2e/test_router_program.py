"""The router as a process: quick and small, and it ends by finishing."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from bench.event_loop import event_loop_thread
from pdserve.model_card import ModelCard
from pdserve.rpc.v1 import worker_pb2 as pb
from tests.fakes.fake_worker import FakeWorker, says
from tests.support.fake_fleet import Fleet, OpenStream, eventually
from tests.support.tiny_tokenizers import byte_level, write_model_folder

pytestmark = pytest.mark.e2e

START_LIMIT_S = 3.0
MEMORY_LIMIT_BYTES = 250 << 20
OUTPUT = byte_level().encode("zyxwvutsrqponmlkjihgfedcba 9876543210").ids
REQUEST: dict[str, Any] = {"temperature": 0, "max_tokens": 10}


@pytest.fixture
def card(tmp_path: Path) -> ModelCard:
    return write_model_folder(tmp_path / "tiny", byte_level())


@pytest.fixture
def worker(card: ModelCard) -> Iterator[FakeWorker]:
    (eos_token_id,) = card.eos_token_ids
    worker = FakeWorker(pb.WORKER_ROLE_DECODE, secret=b"", say=says(OUTPUT), eos_token_id=eos_token_id)
    thread = event_loop_thread()
    thread.run(worker.start())
    yield worker
    worker.assert_idle()
    thread.run(worker.kill())


class Program(Fleet):
    """A router process in front of fakes."""

    process: subprocess.Popen[bytes]


@contextmanager
def run_router(card: ModelCard, worker: FakeWorker, *flags: str) -> Iterator[Program]:
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "pdserve_router", "--model", str(card.path), "--port", "0"]
    command += ["--decode-workers", worker.address, "--announce-fd", str(writing), *flags]
    program = Program(event_loop_thread(), [], [worker])
    with subprocess.Popen(command, pass_fds=[writing], stderr=subprocess.PIPE) as program.process:
        os.close(writing)
        try:
            with os.fdopen(reading) as pipe:
                program.url = "http://" + json.loads(pipe.readline())["address"]
            eventually(lambda: httpx.get(program.url + "/ready").status_code == 200)
            yield program
        finally:
            program.process.kill()


def test_it_starts_fast_and_stays_small(card: ModelCard, worker: FakeWorker) -> None:
    begin_s = time.monotonic()
    with run_router(card, worker) as program:
        assert time.monotonic() - begin_s < START_LIMIT_S
        assert program.complete(**REQUEST).json()["usage"]["completion_tokens"] == 10
        assert psutil.Process(program.process.pid).memory_info().rss < MEMORY_LIMIT_BYTES


def test_the_first_signal_lets_streams_finish_and_turns_others_away(
    card: ModelCard, worker: FakeWorker
) -> None:
    worker.faults.pause_at = 4
    with run_router(card, worker) as program:
        stream = OpenStream(program, **REQUEST)
        stream.read_events(4)
        program.process.send_signal(signal.SIGTERM)
        eventually(lambda: httpx.get(program.url + "/ready").status_code == 503)
        assert program.complete(**REQUEST).status_code == 503
        program.call(worker.resume)
        assert stream.rest()[-1] == "[DONE]"
        assert program.process.wait(5.0) == 0


def test_a_request_that_is_still_arriving_at_the_signal_gets_its_whole_answer(
    card: ModelCard, worker: FakeWorker
) -> None:
    body = json.dumps({"model": card.name, "prompt": "a", **REQUEST}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: router\r\nContent-Length: {len(body)}\r\n"
    with run_router(card, worker) as program:
        host, _, port = program.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=20) as client:
            client.sendall(f"{head}Expect: 100-continue\r\nConnection: close\r\n\r\n".encode())
            assert b"100 Continue" in client.recv(100), "only then is it being accepted"
            program.process.send_signal(signal.SIGTERM)
            with pytest.raises(subprocess.TimeoutExpired):
                program.process.wait(2.0)
            client.sendall(body)
            answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
        assert answer.startswith(b"HTTP/1.1 200"), answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 10
        assert program.process.wait(5.0) == 0


@pytest.mark.parametrize("impatience", ["second signal", "limit"])
def test_a_stream_that_cannot_finish_is_cut_with_an_error(
    card: ModelCard, worker: FakeWorker, impatience: str
) -> None:
    worker.faults.pause_at = 4
    flags = ["--drain-limit-s", "0.2"] if impatience == "limit" else []
    with run_router(card, worker, *flags) as program:
        stream = OpenStream(program, **REQUEST)
        stream.read_events(4)
        program.process.send_signal(signal.SIGTERM)
        if impatience == "second signal":
            eventually(lambda: httpx.get(program.url + "/ready").status_code == 503)
            program.process.send_signal(signal.SIGTERM)
        assert json.loads(stream.rest()[-1])["error"]["code"] == "overloaded"
        assert program.process.wait(5.0) == 0


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ([], "--model"),
        (["--model", "{folder}"], "--decode-workers"),
        (["--model", "/nowhere", "--decode-workers", "127.0.0.1:1"], "/nowhere"),
        (["--model", "{folder}", "--decode-workers", "127.0.0.1:1", "--host", "0.0.0.0"], "PDSERVE_SECRET"),
    ],
)
def test_what_the_operator_must_mend_is_one_line_and_exit_code_2(
    card: ModelCard, flags: list[str], problem: str
) -> None:
    filled = [flag.format(folder=card.path) for flag in flags]
    ended = subprocess.run(
        [sys.executable, "-m", "pdserve_router", *filled],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert ended.returncode == 2
    assert problem in ended.stderr
    assert ended.stderr.count("\n") == 1
