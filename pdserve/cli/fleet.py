"""Child processes that live and die together.

::

    start ─► child announces its address ─► runs ─► any child ends ─► ``first_end`` is set
                                                         owner: ``stop``, whatever happened

A child gets ``--announce-fd FD`` and writes one JSON line, ``{"address": "host:port"}``, to it
as soon as it serves. Its output is repeated on stderr, each line behind the child's name.
Children are never restarted: a lost part is for the operator to see.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from pdserve.cli.plan import Program

MAX_LINE_BYTES = 1 << 20
NAME_WIDTH = 10


@dataclass(slots=True)
class _Child:
    name: str
    process: Process
    announcement: asyncio.StreamReader
    watch: asyncio.Task[None]


class Fleet:
    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._groups: list[list[_Child]] = []
        # Why the first child ended, as a sentence.
        self.first_end: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(self, programs: Sequence[Program]) -> list[str]:
        """The addresses at which they serve; waits until all do, for ever when one cannot."""
        group: list[_Child] = []
        self._groups.append(group)
        for program in programs:
            await self._spawn(program, group)
        return await asyncio.gather(*(_address(child) for child in group))

    async def stop(self, limit_s: float) -> None:
        """Ends what was started last first. Cancelling it kills what is left at once."""
        try:
            async with asyncio.timeout(limit_s):
                for group in reversed(self._groups):
                    _signal(group, signal.SIGTERM)
                    await asyncio.wait([child.watch for child in group])
        except TimeoutError:
            print("pdserve: some parts did not stop in time and are killed", file=sys.stderr)
        finally:
            everything = [child for group in self._groups for child in group]
            _signal(everything, signal.SIGKILL)
            await asyncio.gather(*(child.watch for child in everything))

    async def _spawn(self, program: Program, group: list[_Child]) -> None:
        read_fd, write_fd = os.pipe()
        announcement = await _read_pipe(read_fd)
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "pdserve.cli.child", str(os.getpid()), program.module),
                *(*program.flags, "--announce-fd", str(write_fd)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=PIPE,
                stderr=STDOUT,
                limit=MAX_LINE_BYTES,
                env={**self._environment, **program.environment},
                pass_fds=(write_fd,),
                process_group=0,  # Ctrl-C goes to the parent alone, which stops the rest in order
            )
        finally:
            os.close(write_fd)
        watch = asyncio.create_task(self._watch(program.name, process))
        group.append(_Child(program.name, process, announcement, watch))

    async def _watch(self, name: str, process: Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            print(f"{name:<{NAME_WIDTH}} | {line.decode(errors='replace').rstrip()}", file=sys.stderr)
        code = await process.wait()
        if not self.first_end.done():
            self.first_end.set_result(f"{name} {_describe(code)}")


async def _read_pipe(fd: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb")
    )
    return reader


async def _address(child: _Child) -> str:
    line = await child.announcement.readline()
    if not line:  # it ended; ``first_end`` says why
        await asyncio.Event().wait()
    address = json.loads(line)["address"]
    print(f"{child.name} serves at {address}", file=sys.stderr)
    return str(address)


def _signal(children: Sequence[_Child], number: signal.Signals) -> None:
    for child in children:
        if child.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(child.process.pid, number)


def _describe(return_code: int) -> str:
    if return_code < 0:
        return f"was killed by {signal.Signals(-return_code).name}"
    return f"ended with exit code {return_code}"
