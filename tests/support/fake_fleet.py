"""The router as a program would run it, over real HTTP, with scripted workers behind it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from bench.event_loop import EventLoopThread, event_loop_thread
from pdserve.clock import MonotonicClock
from pdserve.model_card import ModelCard
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.tracing import NoTracer
from pdserve_router.app import create_app
from pdserve_router.config import RouterSettings
from pdserve_router.service import Service
from tests.fakes.fake_worker import FakeWorker, Say

SECRET = b"cluster secret"
MODEL = "tiny"


class Fleet:
    def __init__(self, thread: EventLoopThread, prefill: list[FakeWorker], decode: list[FakeWorker]) -> None:
        self.thread = thread
        self.prefill = prefill
        self.decode = decode
        self.url = ""
        self.app: FastAPI
        self.server: uvicorn.Server
        self.serving: asyncio.Task[None]

    @property
    def workers(self) -> list[FakeWorker]:
        return [*self.prefill, *self.decode]

    @property
    def service(self) -> Service:
        service = self.app.state.service
        assert isinstance(service, Service)
        return service

    def post(self, path: str, body: dict[str, Any], **arguments: Any) -> httpx.Response:
        return httpx.post(self.url + path, json={"model": MODEL} | body, timeout=10.0, **arguments)

    def complete(self, *, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        return self.post("/v1/completions", {"prompt": [5, 6, 7]} | body, headers=headers)

    def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """All events of a stream that must end well."""
        response = self.post(path, body | {"stream": True})
        assert response.status_code == 200, response.text
        *events, last = parse_events(response.content)
        assert last == "[DONE]"
        return [json.loads(event) for event in events]

    def call(self, function: Callable[[], None]) -> None:
        """On the event loop."""

        async def run() -> None:
            function()

        self.thread.run(run())

    def assert_idle(self) -> None:
        for worker in self.workers:
            worker.assert_idle()
        eventually(lambda: self.service.intake.num_running == 0)
        eventually(lambda: all(client.num_requests == 0 for client in self._clients()))

    def wait_ready(self) -> None:
        eventually(lambda: not self.service.problems())

    def _clients(self) -> list[Any]:
        return [*self.service.workers.prefill, *self.service.workers.decode]


class OpenStream:
    """A client in the middle of a stream."""

    def __init__(self, fleet: Fleet, **request: Any) -> None:
        body = {"model": MODEL, "prompt": [5, 6, 7], "stream": True} | request
        self._client = httpx.Client(timeout=10.0)
        self._context = self._client.stream("POST", fleet.url + "/v1/completions", json=body)
        self._response = self._context.__enter__()
        self._chunks = self._response.iter_raw()
        self._received = b""
        assert self._response.status_code == 200

    def read_events(self, count: int) -> None:
        while self._received.count(b"\n\n") < count:
            self._received += next(self._chunks)

    def rest(self) -> list[str]:
        """All events from the first on."""
        self._received += b"".join(self._chunks)
        self.close()
        return parse_events(self._received)

    def close(self) -> None:
        self._context.__exit__(None, None, None)
        self._client.close()


def parse_events(content: bytes) -> list[str]:
    """Strictly: every event is one data line and ends with a blank line."""
    blocks = content.decode().split("\n\n")
    assert blocks.pop() == "", "the stream ends in the middle of an event"
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [block.removeprefix("data: ") for block in blocks]


def eventually(condition: Callable[[], bool], limit_s: float = 5.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, "what the test waits for did not happen"
        threading.Event().wait(0.005)


@contextmanager
def open_fleet(
    card: ModelCard, say: Say, *, num_prefill: int = 1, num_decode: int = 1, **settings: Any
) -> Iterator[Fleet]:
    """``settings`` are the router's."""
    thread = event_loop_thread()
    fleet = thread.run(_start(thread, card, say, num_prefill, num_decode, settings))
    try:
        if fleet.decode:
            fleet.wait_ready()
        yield fleet
    finally:
        fleet.server.should_exit = True
        thread.run(_stop(fleet))


async def _start(
    thread: EventLoopThread,
    card: ModelCard,
    say: Say,
    num_prefill: int,
    num_decode: int,
    settings: dict[str, Any],
) -> Fleet:
    (eos_token_id,) = card.eos_token_ids
    decode = [
        FakeWorker(pb.WORKER_ROLE_DECODE, secret=SECRET, say=say, eos_token_id=eos_token_id)
        for _ in range(num_decode)
    ]
    prefill = [
        FakeWorker(
            pb.WORKER_ROLE_PREFILL, secret=SECRET, say=say, eos_token_id=eos_token_id, decode_workers=decode
        )
        for _ in range(num_prefill)
    ]
    fleet = Fleet(thread, prefill, decode)
    for worker in fleet.workers:
        await worker.start()
    await _start_router(fleet, card, settings)
    return fleet


async def _start_router(fleet: Fleet, card: ModelCard, settings: dict[str, Any]) -> None:
    fleet.app = create_app(
        RouterSettings(
            **{
                "served_model_name": MODEL,
                "prefill_workers": _addresses(fleet.prefill),
                "decode_workers": _addresses(fleet.decode),
            }
            | settings
        ),
        card,
        secret=SECRET,
        clock=MonotonicClock(),
        tracer=NoTracer(),
    )
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)  # so that a slow reader is felt soon
    fleet.server = uvicorn.Server(
        uvicorn.Config(fleet.app, log_config=None, access_log=False, timeout_graceful_shutdown=1)
    )
    fleet.serving = asyncio.create_task(fleet.server.serve([listener]))
    fleet.url = f"http://127.0.0.1:{listener.getsockname()[1]}"


async def _stop(fleet: Fleet) -> None:
    await fleet.serving
    for worker in fleet.workers:
        await worker.kill()


def _addresses(workers: Sequence[FakeWorker]) -> list[str]:
    return [worker.address for worker in workers]
