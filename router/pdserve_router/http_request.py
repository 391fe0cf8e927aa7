"""What is read from a request: the body within its limit, the key, the id, and when the client leaves."""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdserve.errors import BodyTooLarge, Unauthorized

REQUEST_ID_HEADER = "x-request-id"
MAX_CLIENT_ID_CHARACTERS = 128

Result = TypeVar("Result")


class ClientLeft(Exception):
    """Nobody is there to answer."""


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """Counts what arrives, whatever Content-Length claims. Raises ``BodyTooLarge``."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit_bytes:
            raise BodyTooLarge(f"the body is over the limit of {limit_bytes} bytes")
    return bytes(body)


def check_key(request: Request, keys: Sequence[str]) -> None:
    """Raises ``Unauthorized``; takes the same time for every wrong key."""
    if not keys:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    matches = [hmac.compare_digest(given.encode(), key.encode()) for key in keys]
    if scheme.lower() != "bearer" or not any(matches):
        raise Unauthorized("a valid API key is needed: Authorization: Bearer KEY")


async def unless_client_leaves(request: Request, work: Awaitable[Result]) -> Result:
    """The result of ``work``; it is cancelled, and ``ClientLeft`` raised, when the client goes first."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.create_task(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeft
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class RequestIds:
    """ASGI middleware: every answer carries the client's own id, or one made here.

    The id is only echoed and logged, so it is bounded and harmless in a header.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client_id = _sanitized(Headers(scope=scope).get(REQUEST_ID_HEADER, "")) or secrets.token_hex(8)
        scope.setdefault("state", {})["client_id"] = client_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = client_id
            await send(message)

        await self._app(scope, receive, send_with_id)


def _sanitized(client_id: str) -> str:
    return re.sub(r"[^A-Za-z0-9._:/-]", "_", client_id[:MAX_CLIENT_ID_CHARACTERS])
