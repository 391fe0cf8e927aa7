"""The page at ``/``: files of this package, which any browser may read. What they show needs a key."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import FileResponse

FOLDER = Path(__file__).parent / "static"
NAMES = ("page.css", "page.js", "chat.js", "system.js", "plot.js", "dom.js")
FILES = {"/": "index.html", **{f"/{name}": name for name in NAMES}}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def add_page(app: FastAPI) -> None:
    for path, name in FILES.items():
        app.add_api_route(path, _sender(name), methods=["GET"], response_class=FileResponse)


def _sender(name: str) -> Callable[[], Awaitable[FileResponse]]:
    async def send() -> FileResponse:
        return FileResponse(FOLDER / name, headers=HEADERS)

    return send
