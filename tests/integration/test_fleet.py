"""Child processes, with a stub in place of the real programs."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable

import psutil
import pytest

from pdserve.cli.fleet import Fleet
from pdserve.cli.plan import Program

LIMIT_S = 20.0
# Starts one stub, prints its address and waits to be killed.
PARENT = """
import asyncio, os
from pdserve.cli.fleet import Fleet
from tests.integration.test_fleet import stub

async def main():
    print(*await Fleet(dict(os.environ)).start([stub("only")]), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def stub(name: str, *flags: str) -> Program:
    return Program(name, "tests.support.stub_program", flags, {"STUB_NAME": name})


def pid_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def run(scenario: Callable[[Fleet], Awaitable[None]]) -> None:
    async def bounded() -> None:
        fleet = Fleet(dict(os.environ))
        async with asyncio.timeout(LIMIT_S):
            try:
                await scenario(fleet)
            finally:
                await fleet.stop(limit_s=LIMIT_S)

    before = psutil.Process().children(recursive=True)
    asyncio.run(bounded())
    assert psutil.Process().children(recursive=True) == before


def test_all_serve_and_all_stop(capfd: pytest.CaptureFixture[str]) -> None:
    async def scenario(fleet: Fleet) -> None:
        addresses = await fleet.start([stub("a"), stub("b")])
        addresses += await fleet.start([stub("c")])
        assert len({pid_of(address) for address in addresses}) == 3
        assert all(psutil.pid_exists(pid_of(address)) for address in addresses)
        assert not fleet.first_end.done()

    run(scenario)
    lines = capfd.readouterr().err.splitlines()
    assert "a          | hello from a" in lines
    assert "c          | hello from c" in lines


def test_a_child_that_ends_before_it_serves_is_named() -> None:
    async def scenario(fleet: Fleet) -> None:
        starting = asyncio.create_task(fleet.start([stub("good"), stub("bad", "--exit-code", "3")]))
        assert await fleet.first_end == "bad ended with exit code 3"
        assert not starting.done()
        starting.cancel()

    run(scenario)


def test_a_child_that_is_killed_is_named() -> None:
    async def scenario(fleet: Fleet) -> None:
        addresses = await fleet.start([stub("good"), stub("victim")])
        os.kill(pid_of(addresses[1]), signal.SIGKILL)
        assert await fleet.first_end == "victim was killed by SIGKILL"

    run(scenario)


def test_a_child_that_does_not_listen_is_killed(capfd: pytest.CaptureFixture[str]) -> None:
    async def scenario(fleet: Fleet) -> None:
        await fleet.start([stub("deaf", "--deaf")])
        await fleet.stop(limit_s=0.2)

    run(scenario)
    assert "did not stop in time" in capfd.readouterr().err


def test_cancelling_the_stop_kills_at_once() -> None:
    async def scenario(fleet: Fleet) -> None:
        [address] = await fleet.start([stub("deaf", "--deaf")])
        stopping = asyncio.create_task(fleet.stop(limit_s=LIMIT_S))
        await asyncio.sleep(0)
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        assert not psutil.pid_exists(pid_of(address))

    run(scenario)


def test_a_killed_parent_takes_its_children_along() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(pid_of(parent.stdout.readline()))
        parent.kill()
        gone, _ = psutil.wait_procs([child], timeout=LIMIT_S)
        assert gone == [child]
