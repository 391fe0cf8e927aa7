"""Every part is restarted under load, one after the other, as docs/operations.md says: no client notices."""

from __future__ import annotations

import itertools
import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.processes import Processes, Program, eventually, free_port, open_processes

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_CLIENTS = 4
NUM_BETWEEN = 4  # answers that must have come, from each client, before the next part goes
FIELDS: dict[str, Any] = {"max_tokens": 300, "ignore_eos": True, "stream": True}
PROMPTS = [
    " ".join(f"t{5 + (seed + index * 7) % 200}" for index in range(20 + 12 * seed)) for seed in range(6)
]
LIMIT_S = 120.0


@dataclass
class Balancer:
    """What stands before routers: it takes the next where one says 503 or ends a connection unanswered."""

    routers: list[Program]

    def stream(self, client: httpx.Client, body: dict[str, Any]) -> str:
        for router in itertools.chain(self.routers, self.routers):
            request = client.build_request("POST", f"http://{router.address}/v1/completions", json=body)
            try:
                response = client.send(request, stream=True)
            except (httpx.NetworkError, httpx.RemoteProtocolError):
                continue
            with closing(response):
                if response.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                    return _text(response)
        raise AssertionError("no router takes the request")


def _text(response: httpx.Response) -> str:
    """Raises unless the answer is whole."""
    response.raise_for_status()
    lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]", lines[-1]
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])


@dataclass
class Load:
    """Clients that ask one prompt after the other, each for itself, and know what the answers must be."""

    balancer: Balancer
    model: str
    expected: dict[str, str]
    problems: list[str] = field(default_factory=list)
    counts: list[int] = field(default_factory=lambda: [0] * NUM_CLIENTS)
    is_over: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self) -> Iterator[None]:
        clients = [threading.Thread(target=self._ask, args=(number,)) for number in range(NUM_CLIENTS)]
        for client in clients:
            client.start()
        try:
            yield
        finally:
            self.is_over.set()
            for client in clients:
                client.join(LIMIT_S)

    def _ask(self, number: int) -> None:
        with httpx.Client(timeout=LIMIT_S) as client:
            for prompt in itertools.cycle(PROMPTS[number:] + PROMPTS[:number]):
                if self.is_over.is_set():
                    return
                self._ask_once(client, prompt)
                self.counts[number] += 1

    def _ask_once(self, client: httpx.Client, prompt: str) -> None:
        body = {"model": self.model, "prompt": prompt, "temperature": 0, **FIELDS}
        try:
            text = self.balancer.stream(client, body)
        except (httpx.HTTPError, AssertionError) as error:
            self.problems.append(repr(error))
            return
        if text != self.expected[prompt]:
            self.problems.append(f"another answer to {prompt[:20]} …: {text[:60]}")

    def wait(self) -> None:
        """Until every client has got some more answers."""
        goals = [count + NUM_BETWEEN for count in self.counts]
        eventually(lambda: all(map(int.__ge__, self.counts, goals)) or bool(self.problems), LIMIT_S)


def restart(program: Program, is_back: Callable[[], bool]) -> None:
    program.signal(signal.SIGTERM)
    assert program.process is not None
    assert program.process.wait(LIMIT_S) == 0
    program.start()
    eventually(is_back, LIMIT_S)


def is_ready(router: Program) -> bool:
    try:
        return httpx.get(f"http://{router.address}/ready").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def is_used(worker: Program, routers: list[Program]) -> bool:
    """Whether every router has it as ready."""
    told = [httpx.get(f"http://{router.address}/workers").json()["workers"] for router in routers]
    states = [{one["address"]: one["state"] for one in workers}[worker.address] for workers in told]
    return states == ["ready"] * len(routers)


@pytest.fixture(scope="module")
def own(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    logs = tmp_path_factory.mktemp("logs")
    with open_processes(model_folder, logs, num_prefill=2, num_decode=2) as processes:
        yield processes


@pytest.fixture
def routers(own: Processes, tmp_path: Path) -> Iterator[list[Program]]:
    second = Program("pdserve_router", own.router.flags, free_port(), tmp_path / "router-1.log")
    second.start()
    try:
        eventually(lambda: is_ready(second), LIMIT_S)
        yield [own.router, second]
    finally:
        second.kill()


@pytest.mark.timeout(600)
def test_no_client_notices_a_rolling_restart(own: Processes, routers: list[Program]) -> None:
    expected = {prompt: own.text(prompt, **FIELDS | {"stream": False}) for prompt in PROMPTS}
    load = Load(Balancer(routers), own.model.name, expected)
    with load.running():
        for worker in own.workers:
            load.wait()
            restart(worker, partial(is_used, worker, routers))
        for router in routers:
            load.wait()
            restart(router, partial(is_ready, router))
        load.wait()
    assert load.problems == []
    own.assert_blocks_come_back()


@pytest.mark.timeout(600)
def test_an_answer_that_outlasts_the_drain_of_its_worker_goes_on_elsewhere(own: Processes) -> None:
    fields = {"max_tokens": 3000, "ignore_eos": True}
    expected = own.text(PROMPTS[0], **fields)
    answers: list[str] = []
    client = threading.Thread(target=lambda: answers.append(own.text(PROMPTS[0], **fields)))
    client.start()
    eventually(lambda: any(worker.status().num_running for worker in own.decode), LIMIT_S)
    busy = next(worker for worker in own.decode if worker.status().num_running)
    assert busy.process is not None
    busy.signal(signal.SIGTERM)
    eventually(lambda: busy.status().draining, LIMIT_S)
    busy.signal(signal.SIGTERM)  # the end of its patience
    assert busy.process.wait(LIMIT_S) == 0
    assert client.is_alive(), "it has been too quick to be moved"
    client.join(LIMIT_S)
    assert answers == [expected]
    busy.start()
    eventually(partial(is_used, busy, [own.router]), LIMIT_S)
    own.assert_blocks_come_back()
