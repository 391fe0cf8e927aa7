"""Asks each worker, at its own address, who it is, how it is and what time it has."""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import dataclass

import grpc

from pdserve.cli.doctor.router_facts import ListedWorker
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.rpc.v1 import worker_pb2_grpc as pb_grpc

WORKER_LIMIT_S = 5.0
_ROLES = {pb.WORKER_ROLE_PREFILL: "prefill", pb.WORKER_ROLE_DECODE: "decode"}


@dataclass(frozen=True, slots=True)
class Answer:
    """``clock_ahead_s``: the worker's wall clock less ours, uncertain by half of ``round_trip_s``;
    None from a worker that does not tell its time. ``boot_id`` is equal on one host.
    """

    role: str
    model_name: str
    model_fingerprint: str
    version: str
    boot_id: str
    max_context_tokens: int
    room_tokens: int
    is_draining: bool
    last_step_age_s: float
    clock_ahead_s: float | None
    round_trip_s: float


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """Without an ``answer`` there is a ``problem``: why the doctor cannot talk to it."""

    listed: ListedWorker
    answer: Answer | None = None
    problem: str = ""

    @property
    def address(self) -> str:
        return self.listed.address

    @property
    def name(self) -> str:
        return f"{self.listed.role} worker {self.listed.address}"


async def gather_worker(listed: ListedWorker) -> WorkerFacts:
    problem = await _port_problem(listed.address)
    if problem:
        return WorkerFacts(listed, problem=problem)
    try:
        return WorkerFacts(listed, answer=await _ask(listed.address))
    except grpc.aio.AioRpcError as error:
        return WorkerFacts(listed, problem=f"the port is open, but no worker answers: {error.details()}")


async def _port_problem(address: str) -> str:
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(WORKER_LIMIT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            writer.close()
            await writer.wait_closed()
    except ConnectionRefusedError:
        return "the port is closed: nothing listens there"
    except TimeoutError:
        return f"no answer in {WORKER_LIMIT_S:g} s: a firewall, or the host is down"
    except socket.gaierror as error:
        return f"its name has no address: {error.strerror}"
    except OSError as error:
        return str(error)
    return ""


async def _ask(address: str) -> Answer:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = pb_grpc.WorkerStub(channel)
        # The first call pays for the connection, which would blur the clock.
        await stub.GetStatus(pb.GetStatusRequest(), timeout=WORKER_LIMIT_S)
        asked_s, began_s = time.time(), time.monotonic()
        status = await stub.GetStatus(pb.GetStatusRequest(), timeout=WORKER_LIMIT_S)
        round_trip_s = time.monotonic() - began_s
    return _answer(status, expected_unix_s=asked_s + round_trip_s / 2, round_trip_s=round_trip_s)


def _answer(status: pb.WorkerStatus, *, expected_unix_s: float, round_trip_s: float) -> Answer:
    identity = status.identity
    return Answer(
        role=_ROLES.get(identity.role, "unknown"),
        model_name=identity.model_name,
        model_fingerprint=identity.model_fingerprint,
        version=identity.version,
        boot_id=identity.boot_id,
        max_context_tokens=identity.max_context_tokens,
        room_tokens=(identity.num_blocks - 1) * identity.block_size,  # block 0 is never handed out
        is_draining=status.draining,
        last_step_age_s=status.last_step_age_s,
        clock_ahead_s=status.wall_clock_unix_s - expected_unix_s if status.wall_clock_unix_s else None,
        round_trip_s=round_trip_s,
    )
