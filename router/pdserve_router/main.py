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

import uvicorn

from pdserve import logs
from pdserve.config import load, secret_bytes
from pdserve.errors import ConfigError
from pdserve.model_card import read_model_card
from pdserve_router.app import Services, create_app
from pdserve_router.config import RouterSettings


def main() -> int:
    try:
        settings = load(RouterSettings, sys.argv[1:], os.environ)
        logs.configure(settings.log_level)
        if settings.model is None:
            raise ConfigError("--model is needed: the folder with the tokenizer of the workers' model")
        if not settings.decode_workers:
            raise ConfigError("--decode-workers is needed: at least one host:port")
        card = read_model_card(Path(settings.model))
        app = create_app(settings, card, secret=secret_bytes(settings.secret, settings.host))
        listener = _bind(settings.host, settings.port)
    except ConfigError as error:
        print(f"pdserve-router: {error}", file=sys.stderr)
        return 2
    config = uvicorn.Config(app, log_config=None, access_log=False, timeout_keep_alive=30)
    asyncio.run(_serve(_Server(config), listener, settings, app.state.services))
    return 0


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
    server: uvicorn.Server, listener: socket.socket, settings: RouterSettings, services: Services
) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Semaphore(0)
    serving = asyncio.create_task(server.serve([listener]))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.release)
    _announce(listener, settings.announce_fd)
    stopping = asyncio.create_task(stop.acquire())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    services.is_draining = True
    idle = asyncio.create_task(services.wait_idle())
    again = asyncio.create_task(stop.acquire())
    await asyncio.wait({idle, again}, timeout=settings.drain_limit_s, return_when=asyncio.FIRST_COMPLETED)
    server.force_exit = True
    server.should_exit = True
    await serving


def _announce(listener: socket.socket, announce_fd: int | None) -> None:
    host, port = listener.getsockname()[:2]
    if announce_fd is not None:
        with os.fdopen(announce_fd, "w") as pipe:
            pipe.write(json.dumps({"address": f"{host}:{port}"}) + "\n")
