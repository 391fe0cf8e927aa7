"""``pdserve up``: start everything, say where it serves, stop everything.

The first signal (SIGINT, SIGTERM, SIGHUP) lets running requests finish up to the drain limit,
the second one ends them. Exit codes: 0 stopped by a signal, 1 a part ended or did not start in
time, 2 wrong settings.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from pdserve import logs
from pdserve.cli import plan
from pdserve.cli.fleet import Fleet
from pdserve.cli.settings import UpSettings
from pdserve.config import load
from pdserve.model.embedded import resolve_model
from pdserve.version import VERSION

# What a program needs beyond its drain limit to close what it has.
STOP_SLACK_S = 5.0


def main(argv: Sequence[str], environment: Mapping[str, str]) -> int:
    """Raises ``ConfigError``."""
    settings = load(UpSettings, argv, environment)
    logs.configure(settings.log_level)
    started_s = time.monotonic()
    model = resolve_model(settings.model)
    return asyncio.run(_up(settings, model, environment, started_s=started_s))


async def _up(settings: UpSettings, model: Path, environment: Mapping[str, str], *, started_s: float) -> int:
    signals = _signals()
    fleet = Fleet({"PDSERVE_SECRET": secrets.token_hex(32), **environment})
    starting = asyncio.create_task(_start(fleet, settings, model))
    signalled = asyncio.create_task(signals.get())
    _say(
        f"pdserve {VERSION}: starting {settings.prefill} prefill + {settings.decode} decode + 1 router, "
        f"model {model.name}"
    )
    try:
        async with asyncio.timeout(settings.start_limit_s):
            await _first_of(starting, fleet.first_end, signalled)
        if starting.done():
            _say(_greeting(starting.result(), model.name, took_s=time.monotonic() - started_s))
            await _first_of(fleet.first_end, signalled)
        if signalled.done():
            _say("pdserve: stopping")
            return 0
        _say(f"pdserve: {fleet.first_end.result()}; stopping the rest")
    except TimeoutError:
        _say(f"pdserve: not all parts serve after {settings.start_limit_s:g} s (--start-limit-s); stopping")
    finally:
        starting.cancel()
        await asyncio.wait([starting])
        await _stop(fleet, signals, limit_s=settings.drain_limit_s + STOP_SLACK_S)
    return 1


async def _start(fleet: Fleet, settings: UpSettings, model: Path) -> str:
    """The router's address."""
    num_cores = len(os.sched_getaffinity(0))
    prefill = plan.prefill_workers(settings, model, num_cores=num_cores)
    decode = plan.decode_workers(settings, model, num_cores=num_cores)
    addresses = await fleet.start([*prefill, *decode])
    router = plan.router(
        settings,
        model,
        prefill_addresses=addresses[: len(prefill)],
        decode_addresses=addresses[len(prefill) :],
    )
    return (await fleet.start([router]))[0]


async def _stop(fleet: Fleet, signals: asyncio.Queue[None], *, limit_s: float) -> None:
    stopping = asyncio.create_task(fleet.stop(limit_s))
    impatient = asyncio.create_task(signals.get())
    await _first_of(stopping, impatient)
    if impatient.done():
        stopping.cancel()
    await asyncio.wait([stopping])


def _signals() -> asyncio.Queue[None]:
    """Gets an item for every signal that asks to stop."""
    signals: asyncio.Queue[None] = asyncio.Queue()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, None)
    return signals


async def _first_of(*futures: asyncio.Future[str] | asyncio.Task[str] | asyncio.Task[None]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


def _greeting(address: str, model_name: str, *, took_s: float) -> str:
    body = json.dumps(
        {
            "model": model_name,
            "messages": [{"role": "user", "content": "Name three rivers."}],
            "stream": True,
        }
    )
    return f"""
pdserve is ready at http://{address} after {took_s:.1f} s; Ctrl-C stops it. Try:

curl -N http://{address}/v1/chat/completions -H 'Content-Type: application/json' \\
  -d '{body}'
"""


def _say(text: str) -> None:
    print(text, flush=True)
