"""A worker as a program: start, announce, serve, drain, stop.

SIGTERM or SIGINT: new requests are refused and every router is told, running ones finish
up to ``drain_limit_s``, then the sessions close. A second signal skips the wait.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Protocol

import grpc

from pdserve.errors import ConfigError
from pdserve.rpc.session import SessionServer, WorkerService
from pdserve.rpc.v1 import worker_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)

EXIT_BROKEN = 70
STOP_GRACE_S = 0.5
ENGINE_STOP_LIMIT_S = 10.0
# Token batches are small; a prompt of a million tokens is 4 MB.
MAX_MESSAGE_BYTES = 32 << 20

# Both ends agree that a quiet session is pinged every few seconds: a peer that vanished
# without a FIN is noticed, and no server counts the pings as abuse.
SERVER_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
]


class DrainableService(WorkerService, Protocol):
    def start_draining(self) -> None: ...
    async def wait_idle(self) -> None: ...


def new_server() -> grpc.aio.Server:
    return grpc.aio.server(options=SERVER_OPTIONS)


def bind(server: grpc.aio.Server, host: str, port: int) -> int:
    """The bound port. Raises ``ConfigError`` when it cannot be had."""
    try:
        return server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: is the port in use?") from error


def announce(address: str, announce_fd: int | None) -> None:
    """Tells whoever started this program where it serves, as one JSON line on the given pipe."""
    logger.info("serving address=%s", address)
    if announce_fd is not None:
        with os.fdopen(announce_fd, "w") as pipe:
            pipe.write(json.dumps({"address": address}) + "\n")


def end_broken() -> None:
    """Ends the process at once: with a promise broken, tidying up could only do more harm."""
    logger.critical("ending reason=engine_broken")
    logging.shutdown()
    os._exit(EXIT_BROKEN)


async def serve(
    server: grpc.aio.Server,
    service: DrainableService,
    sessions: SessionServer,
    *,
    drain_limit_s: float,
    on_serving: Callable[[], None],
) -> None:
    """Runs until a signal, then drains. The caller stops engine and links afterwards."""
    signals = _signals()
    pb_grpc.add_WorkerServicer_to_server(sessions, server)
    await server.start()
    on_serving()
    await signals()
    logger.info("draining limit_s=%g", drain_limit_s)
    service.start_draining()
    sessions.push_status()
    await _first_of(service.wait_idle(), signals(), limit_s=drain_limit_s)
    sessions.close_sessions()
    await server.stop(STOP_GRACE_S)
    logger.info("stopped")


def _signals() -> Callable[[], Awaitable[None]]:
    """A function that waits for the next SIGTERM or SIGINT, none lost in between."""
    pending = asyncio.Semaphore(0)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, pending.release)

    async def next_signal() -> None:
        await pending.acquire()

    return next_signal


async def _first_of(*waits: Awaitable[None], limit_s: float) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
