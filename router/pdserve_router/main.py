"""``pdserve-router``: the router as a program.

SIGTERM or SIGINT: readiness goes, new requests get 503, running ones finish up to
``drain_limit_s``. A second signal ends at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from pdserve import logs
from pdserve.clock import MonotonicClock
from pdserve.config import load, secret_bytes
from pdserve.errors import ConfigError, Overloaded
from pdserve.model_card import read_model_card
from pdserve.tracing import tracer
from pdserve_router.app import create_app
from pdserve_router.config import RouterSettings
from pdserve_router.service import Service


def main() -> int:
    try:
        settings = load(RouterSettings, sys.argv[1:], os.environ)
        logs.configure(settings.log_level)
        if settings.model is None:
            raise ConfigError("--model is needed: the folder with the tokenizer of the workers' model")
        if not settings.decode_workers:
            raise ConfigError("--decode-workers is needed: at least one host:port")
        card = read_model_card(Path(settings.model))
        clock = MonotonicClock()
        app = create_app(
            settings,
            card,
            secret=secret_bytes(settings.secret, settings.host),
            clock=clock,
            tracer=tracer("pdserve-router", os.environ, clock),
        )
        listener = _bind(settings.host, settings.port)
    except ConfigError as error:
        print(f"pdserve-router: {error}", file=sys.stderr)
        return 2
    config = uvicorn.Config(
        app,
        http="httptools",
        log_config=None,
        access_log=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=1,  # for the last bytes; answers have been waited for
    )
    uvloop.run(_serve(_Server(config), listener, settings, app.state.service))
    return 0


# What a cut answer needs to tell its client.
CUT_LIMIT_S = 1.0


class _Server(uvicorn.Server):
    """Leaves signals to us: uvicorn's own handling would refuse connections while answers still run."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bind(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=2048)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error


async def _serve(
    server: uvicorn.Server, listener: socket.socket, settings: RouterSettings, service: Service
) -> None:
    loop = asyncio.get_running_loop()
    signals = asyncio.Semaphore(0)
    serving = asyncio.create_task(server.serve([listener]))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.release)
    _announce(listener, settings.announce_fd)
    await _first_of(serving, asyncio.create_task(signals.acquire()))
    service.intake.close()
    if await _drain(service, signals, settings.drain_limit_s):
        await _drain(service, signals, CUT_LIMIT_S)
    server.should_exit = True
    await serving


async def _drain(service: Service, signals: asyncio.Semaphore, limit_s: float) -> bool:
    """Waits for running requests; after the limit or another signal, cuts those left. Whether it had to."""
    idle = asyncio.create_task(service.intake.wait_idle())
    again = asyncio.create_task(signals.acquire())
    await _first_of(idle, again, limit_s=limit_s)
    if service.intake.is_idle:
        return False
    service.answerer.cut_all(Overloaded("the router is shutting down", retry_after_s=1.0))
    return True


async def _first_of(*tasks: asyncio.Task[Any], limit_s: float | None = None) -> None:
    await asyncio.wait(tasks, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)


def _announce(listener: socket.socket, announce_fd: int | None) -> None:
    host, port = listener.getsockname()[:2]
    if announce_fd is not None:
        with os.fdopen(announce_fd, "w") as pipe:
            pipe.write(json.dumps({"address": f"{host}:{port}"}) + "\n")
