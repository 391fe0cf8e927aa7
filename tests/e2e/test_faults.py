"""Processes die, stop and come back; clients get a whole answer or a clean error, in time."""

import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.processes import Processes, eventually, open_processes

pytestmark = pytest.mark.e2e

PROMPT = " ".join(f"t{5 + index * 7 % 200}" for index in range(60))
LONG = {"max_tokens": 1500, "ignore_eos": True}  # about a second
ENDLESS = {"max_tokens": 4000, "ignore_eos": True}  # outlasts what is done to it
ERROR_LIMIT_S = 2.0


@pytest.fixture
def own(model_folder: Path, tmp_path: Path) -> Iterator[Processes]:
    with open_processes(model_folder, tmp_path) as processes:
        yield processes


class Stream:
    """A streamed completion read on a thread of its own."""

    def __init__(self, processes: Processes, **fields: Any) -> None:
        self.events: list[dict[str, Any]] = []
        self.is_done = False
        self.ended_s = 0.0
        body = {"model": processes.model.name, "prompt": PROMPT, "temperature": 0, "stream": True} | fields
        self._thread = threading.Thread(target=self._read, args=(f"{processes.url}/v1/completions", body))
        self._thread.start()

    @property
    def text(self) -> str:
        return "".join(choice["text"] for event in self.events for choice in event.get("choices", ()))

    @property
    def error(self) -> dict[str, Any] | None:
        return next((event["error"] for event in self.events if "error" in event), None)

    def wait_for_events(self, count: int) -> None:
        eventually(lambda: len(self.events) >= count, 30.0)

    def join(self) -> None:
        self._thread.join(60)

    def _read(self, url: str, body: dict[str, Any]) -> None:
        with httpx.stream("POST", url, json=body, timeout=60) as response:
            if response.status_code != httpx.codes.OK:
                self.events.append(json.loads(response.read()))
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    self.is_done = True
                elif line.startswith("data: "):
                    self.events.append(json.loads(line[6:]))
        self.ended_s = time.monotonic()


def test_decode_killed_in_mid_stream_is_a_clean_error_and_the_next_request_works(own: Processes) -> None:
    expected = own.text(PROMPT, **LONG)
    stream = Stream(own, **LONG)
    stream.wait_for_events(5)
    killed_s = time.monotonic()
    own.decode[0].kill()
    stream.join()
    assert stream.ended_s - killed_s < ERROR_LIMIT_S
    assert stream.error is not None
    assert not stream.is_done
    assert own.client.get(f"{own.url}/health").status_code == 200
    assert own.client.get(f"{own.url}/ready").status_code == 503
    own.decode[0].start()
    own.wait_ready()
    assert own.text(PROMPT, **LONG) == expected
    own.assert_blocks_come_back()


def test_prefill_killed_in_mid_request_costs_time_not_the_answer(own: Processes) -> None:
    expected = own.text(PROMPT, **LONG)
    own.prefill[0].signal(signal.SIGSTOP)
    stream = Stream(own, **LONG)
    eventually(lambda: own.decode[0].status().num_reserved == 1, 10.0)
    own.prefill[0].kill()
    stream.join()
    assert (stream.text, stream.error, stream.is_done) == (expected, None, True)
    assert own.text(PROMPT, **LONG) == expected, "decode workers prefill when no prefill worker is there"
    own.prefill[0].start()
    own.wait_ready()
    assert own.text(PROMPT, **LONG) == expected
    own.assert_blocks_come_back()


def test_with_a_second_decode_worker_the_stream_goes_on_where_it_was(
    model_folder: Path, tmp_path: Path
) -> None:
    with open_processes(model_folder, tmp_path, num_decode=2) as processes:
        expected = processes.text(PROMPT, **LONG)
        stream = Stream(processes, **LONG)
        stream.wait_for_events(5)
        busy = next(program for program in processes.decode if program.status().num_running)
        busy.kill()
        stream.join()
        assert (stream.text, stream.error, stream.is_done) == (expected, None, True)


def test_a_client_that_leaves_frees_both_workers(own: Processes) -> None:
    body = {"model": own.model.name, "prompt": PROMPT, "stream": True, **ENDLESS}
    with httpx.stream("POST", f"{own.url}/v1/completions", json=body) as response:
        next(response.iter_lines())
    own.assert_blocks_come_back()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{own.url}/v1/completions", json=body | {"stream": False}, timeout=0.2)
    own.assert_blocks_come_back()


def test_a_killed_router_frees_both_workers(own: Processes) -> None:
    stream_thread = threading.Thread(target=_ignore_errors, args=(own,))
    stream_thread.start()
    eventually(lambda: own.decode[0].status().num_running == 1, 10.0)
    own.router.kill()
    stream_thread.join()
    own.assert_blocks_come_back()
    own.router.start()
    own.wait_ready()
    assert own.text(PROMPT, max_tokens=3)


def _ignore_errors(own: Processes) -> None:
    try:
        own.complete(PROMPT, **ENDLESS)
    except httpx.TransportError:
        return


@pytest.mark.parametrize("part", ["router", "prefill", "decode"])
def test_sigterm_lets_running_requests_finish(own: Processes, part: str) -> None:
    expected = own.text(PROMPT, **LONG)
    stream = Stream(own, **LONG)
    stream.wait_for_events(5)
    program = {"router": own.router, "prefill": own.prefill[0], "decode": own.decode[0]}[part]
    program.signal(signal.SIGTERM)
    stream.join()
    assert (stream.text, stream.error, stream.is_done) == (expected, None, True)
    assert program.process is not None
    assert program.process.wait(10) == 0


def test_the_router_is_small_and_quick_to_start(own: Processes) -> None:
    own.router.kill()
    begin_s = time.monotonic()
    own.router.start()

    def is_up() -> bool:
        try:
            return own.client.get(f"{own.url}/health").status_code == 200
        except httpx.TransportError:
            return False

    eventually(is_up, 10.0)
    assert time.monotonic() - begin_s < 3.0
    own.wait_ready()
    own.text(PROMPT, **LONG)
    resident_kb = int(
        next(
            line.split()[1]
            for line in Path(f"/proc/{own.router.pid}/status").read_text().splitlines()
            if line.startswith("VmRSS")
        )
    )
    assert resident_kb < 250 * 1024
