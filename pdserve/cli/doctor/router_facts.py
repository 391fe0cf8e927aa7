"""Asks a router, over HTTP, whether it is ready and which workers it knows."""

from __future__ import annotations

import asyncio
import http.client
import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

ROUTER_LIMIT_S = 5.0
_UNAVAILABLE = 503


@dataclass(frozen=True, slots=True)
class ListedWorker:
    """A worker as the router sees it. ``state``: ready, draining, stuck or down, with its ``problem``."""

    address: str
    role: str
    state: str
    problem: str


@dataclass(frozen=True, slots=True)
class RouterFacts:
    """``problem``: why nothing else is known. ``not_ready``: why the router would refuse requests."""

    url: str
    problem: str = ""
    not_ready: tuple[str, ...] = ()
    workers: tuple[ListedWorker, ...] = ()
    unresolved: tuple[str, ...] = ()


class RouterProblem(Exception):
    """As a sentence for the operator."""


async def gather_router(url: str, api_key: str | None) -> RouterFacts:
    try:
        ready = await asyncio.to_thread(_get, f"{url}/ready", None)
        known = await asyncio.to_thread(_get, f"{url}/workers", api_key)
        workers = tuple(ListedWorker(**worker) for worker in known["workers"])
        return RouterFacts(url, "", tuple(ready["problems"]), workers, tuple(known["unresolved"]))
    except RouterProblem as problem:
        return RouterFacts(url, str(problem))
    except (KeyError, TypeError):
        return RouterFacts(url, "it answers, but not as a pdserve router of this version does")


def _get(url: str, api_key: str | None) -> dict[str, Any]:
    """A 503 is an answer too: it says what is not ready. Raises ``RouterProblem``."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(urllib.request.Request(url, headers=headers), timeout=ROUTER_LIMIT_S) as response:
            return _json(response.read())
    except urllib.error.HTTPError as error:
        with error:
            if error.code == _UNAVAILABLE:
                return _json(error.read())
        raise RouterProblem(_explain(error.code)) from None
    except urllib.error.URLError as error:
        raise RouterProblem(_reason(error.reason)) from None
    except TimeoutError:
        raise RouterProblem(f"it gave no answer in {ROUTER_LIMIT_S:g} s") from None
    except (OSError, http.client.HTTPException) as error:
        raise RouterProblem(f"it does not speak HTTP: {error}") from None


def _json(body: bytes) -> dict[str, Any]:
    try:
        content = json.loads(body)
    except ValueError:
        raise RouterProblem("it answers, but not as a pdserve router does") from None
    return content if isinstance(content, dict) else {}


def _explain(status: int) -> str:
    if status == http.client.UNAUTHORIZED:
        return "it wants an API key: set PDSERVE_API_KEY to a valid one"
    return f"it answers with HTTP status {status}: is it a pdserve router of this version?"


def _reason(reason: object) -> str:
    if isinstance(reason, ConnectionRefusedError):
        return "the port is closed: nothing listens there"
    if isinstance(reason, TimeoutError):
        return f"it gave no answer in {ROUTER_LIMIT_S:g} s: a firewall, or the host is down"
    return str(reason)
