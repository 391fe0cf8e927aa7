"""NCCL between two ends of one process, with errors by script.

Like the real one it never blocks, lets an operation wait for its partner for ever, and tells of
errors later: ``status`` is where they show.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from pdserve.transfer.nccl.library import IN_PROGRESS, SUCCESS, NcclError
from tests.support.fake_device import FakeDevice

SYSTEM_ERROR, REMOTE_ERROR = 2, 6


@dataclass(eq=False)
class _World:
    """What two ranks share: who has joined, and sends that wait for their receive, by sender."""

    joined: set[int] = field(default_factory=set)
    sends: dict[int, deque[Any]] = field(default_factory=lambda: {0: deque(), 1: deque()})


@dataclass(eq=False)
class FakeCommunicator:
    world: _World
    rank: int
    is_aborted: bool = False
    num_operations: int = 0


@dataclass
class Script:
    """What goes wrong, from the operation of this number on. An operation is a send or a receive."""

    init_status: int = SUCCESS
    init_hangs: bool = False
    fail_from: int = 1 << 30
    failure: int = REMOTE_ERROR
    stall_from: int = 1 << 30
    corrupt: bool = False
    abort_hangs: bool = False
    abort_fails: bool = False


class FakeNccl:
    """One process's library; those of a ``FakeFabric`` reach each other."""

    def __init__(self, fabric: FakeFabric, device: FakeDevice, version: str) -> None:
        self.script = Script()
        self.num_ids = 0
        self.aborted: list[FakeCommunicator] = []
        self.communicators: list[FakeCommunicator] = []
        self.received: list[Any] = []
        self.let_abort_go = threading.Event()
        self._fabric = fabric
        self._device = device
        self._version = version

    def version(self) -> str:
        return self._version

    def unique_id(self) -> bytes:
        self.num_ids += 1
        return self._fabric.new_world()

    def init(self, unique_id: bytes, *, rank: int) -> FakeCommunicator:
        if self.script.init_status != SUCCESS:
            raise NcclError("init", self.script.init_status, "scripted")
        world = self._fabric.worlds[unique_id]
        if not self.script.init_hangs:
            world.joined.add(rank)
        self.communicators.append(FakeCommunicator(world, rank))
        return self.communicators[-1]

    def status(self, communicator: Any) -> int:
        assert not communicator.is_aborted, "a call after the abort"
        if communicator.num_operations > self.script.fail_from:
            return self.script.failure
        return SUCCESS if communicator.world.joined == {0, 1} else IN_PROGRESS

    def send(self, communicator: Any, data: Any, *, peer: int, stream: int) -> None:
        self._start(communicator, peer)
        number = communicator.num_operations
        taken = threading.Event()
        communicator.world.sends[communicator.rank].append((data, taken))

        def work() -> bool:
            return communicator.is_aborted or (taken.is_set() and number <= self.script.stall_from)

        self._device.lanes[stream].enqueue(work)

    def receive(self, communicator: Any, data: Any, *, peer: int, stream: int) -> None:
        self._start(communicator, peer)
        number = communicator.num_operations
        sends = communicator.world.sends[peer]

        def work() -> bool:
            if communicator.is_aborted:
                return True
            if number > self.script.stall_from or not sends:
                return False
            sent, taken = sends.popleft()
            assert len(sent) == len(data), f"{len(sent)} bytes sent, {len(data)} expected"
            data[:] = sent
            self.received.append(data)
            if self.script.corrupt:
                data[0] ^= 1
            taken.set()
            return True

        self._device.lanes[stream].enqueue(work)

    def abort(self, communicator: Any) -> None:
        assert not communicator.is_aborted, "aborted twice"
        if self.script.abort_hangs:
            self.let_abort_go.wait(30.0)
        if self.script.abort_fails:
            raise NcclError("abort", SYSTEM_ERROR, "scripted")
        communicator.is_aborted = True
        self.aborted.append(communicator)

    def _start(self, communicator: FakeCommunicator, peer: int) -> None:
        assert not communicator.is_aborted, "a call after the abort"
        assert self.status(communicator) == SUCCESS, "a call while another is in progress"
        assert peer == 1 - communicator.rank, "a rank talks to the other one"
        communicator.num_operations += 1


class FakeFabric:
    """What joins processes."""

    def __init__(self) -> None:
        self.worlds: dict[bytes, _World] = {}
        self._numbers = itertools.count(1)

    def new_world(self) -> bytes:
        unique_id = next(self._numbers).to_bytes(128, "little")
        self.worlds[unique_id] = _World()
        return unique_id
