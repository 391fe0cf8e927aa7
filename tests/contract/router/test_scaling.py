"""Workers behind a name come and go without a restart of the router. Real sessions, a scripted name."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.event_loop import event_loop_thread
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve_router import pool
from pdserve_router.resolve import LookupFailed, Target
from pdserve_router.workers import Workers
from tests.fakes.fake_worker import FakeWorker, says
from tests.support.fake_fleet import SECRET, eventually, open_fleet
from tests.support.tiny_tokenizers import byte_level, write_model_folder

NAME = "decode:7000"


class Names:
    """A name server."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = list(addresses)
        self.is_down = False
        self.num_asked = 0

    async def resolve(self, target: Target) -> list[str]:
        assert str(target) == NAME
        self.num_asked += 1
        if self.is_down:
            raise LookupFailed("no answer")
        return self.addresses


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "RESOLVE_PERIOD_S", 0.02)


@pytest.fixture
def decode() -> Iterator[list[FakeWorker]]:
    thread = event_loop_thread()
    workers = [
        FakeWorker(pb.WORKER_ROLE_DECODE, secret=SECRET, say=says([1]), eos_token_id=0) for _ in range(2)
    ]
    for worker in workers:
        thread.run(worker.start())
    yield workers
    for worker in workers:
        thread.run(worker.kill())


@contextmanager
def following(names: Names, *targets: str) -> Iterator[Workers]:
    thread = event_loop_thread()

    async def start() -> tuple[Workers, asyncio.Task[None]]:
        workers = Workers(prefill=[], decode=targets or [NAME], secret=SECRET, resolve=names.resolve)
        return workers, asyncio.create_task(workers.run())

    async def stop() -> None:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    workers, running = thread.run(start())
    try:
        yield workers
        assert not running.done()
    finally:
        thread.run(stop())


def ready(workers: Workers) -> list[str]:
    return sorted(client.address for client in workers.ready_decode(()))


def known(workers: Workers) -> list[str]:
    return sorted(client.address for client in workers.decode)


def asked_again(names: Names) -> None:
    before = names.num_asked
    eventually(lambda: names.num_asked > before + 1)


def test_a_worker_that_a_name_gains_is_used_and_one_that_it_loses_is_forgotten(
    decode: list[FakeWorker],
) -> None:
    first, second = (worker.address for worker in decode)
    names = Names(first)
    with following(names) as workers:
        eventually(lambda: ready(workers) == [first])
        names.addresses = [first, second]
        eventually(lambda: ready(workers) == sorted([first, second]))
        names.addresses = [first]
        event_loop_thread().run(decode[1].kill())
        eventually(lambda: known(workers) == [first])
        event_loop_thread().run(decode[1].start())


def test_a_worker_whose_name_is_gone_is_kept_while_its_session_lasts(decode: list[FakeWorker]) -> None:
    names = Names(decode[0].address)
    with following(names) as workers:
        eventually(lambda: bool(ready(workers)))
        names.addresses = []
        asked_again(names)
        assert ready(workers) == [decode[0].address]


def test_nothing_changes_while_no_name_server_answers(decode: list[FakeWorker]) -> None:
    names = Names(decode[0].address)
    with following(names) as workers:
        eventually(lambda: bool(ready(workers)))
        names.is_down = True
        event_loop_thread().run(decode[0].kill())
        asked_again(names)
        assert known(workers) == [decode[0].address]
        event_loop_thread().run(decode[0].start())
        eventually(lambda: bool(ready(workers)))


def test_a_name_without_addresses_is_named_as_the_problem() -> None:
    with following(Names()) as workers:
        assert workers.problems() == [f"no decode worker is ready: {NAME} has no address"]


def test_a_worker_known_under_two_addresses_is_asked_once(decode: list[FakeWorker]) -> None:
    thread = event_loop_thread()
    thread.run(decode[0].kill())
    decode[0].address = "0.0.0.0:0"
    thread.run(decode[0].start())
    port = decode[0].address.rpartition(":")[2]
    with following(Names(), f"127.0.0.1:{port}", f"127.0.0.2:{port}") as workers:
        eventually(lambda: all(client.is_ready for client in workers.decode))
        assert ready(workers) == [f"127.0.0.1:{port}"]


def test_a_name_of_this_host_serves_requests(tmp_path: Path) -> None:
    card = write_model_folder(tmp_path, byte_level())
    output = byte_level().encode("abc").ids
    with open_fleet(card, says(output), num_prefill=0) as fleet:
        port = fleet.decode[0].address.rpartition(":")[2]
        named = {"decode_workers": [f"localhost:{port}"]}
        with open_fleet(card, says(output), num_prefill=0, num_decode=0, **named) as router:
            router.wait_ready()
            answer = router.complete(temperature=0, max_tokens=3).json()
            assert answer["choices"][0]["text"] == "abc"
