"""Server-sent events as a response that notices at once when the client leaves."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pdserve_router.http_request import wait_for_disconnect

logger = logging.getLogger(__name__)

# A client that takes nothing for this long is cut; its buffers are bounded anyway.
STALLED_CLIENT_LIMIT_S = 30.0
DONE = b"data: [DONE]\n\n"


_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def event(content: dict[str, Any]) -> bytes:
    return b"data: " + _JSON.encode(content).encode() + b"\n\n"


class EventStream(Response):
    """Sends what the generator yields; closes it when the client has gone, in whatever phase."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send_all(send))
        leaving = asyncio.create_task(wait_for_disconnect(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
        if not sending.cancelled():
            sending.result()

    async def _send_all(self, send: Send) -> None:
        """An answer without its end makes the server cut the connection."""
        async with aclosing(self._events) as events:
            start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            await send(start)
            try:
                async for chunk in events:
                    async with asyncio.timeout(STALLED_CLIENT_LIMIT_S):
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except TimeoutError:
                logger.warning("client_stalled limit_s=%g", STALLED_CLIENT_LIMIT_S)
                return
            await send({"type": "http.response.body", "body": b"", "more_body": False})
