"""The HTTP surface: routes and errors. What a request means is decided elsewhere.

Importing this module starts nothing. ``create_app`` puts the parts together; the sessions
with the workers live as long as the application does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from pdserve.clock import Clock
from pdserve.errors import Overloaded, PdserveError, RequestError, Unauthorized
from pdserve.model_card import ModelCard
from pdserve.tracing import Tracer
from pdserve_router.config import RouterSettings
from pdserve_router.http_request import ClientLeft, RequestIds
from pdserve_router.openai_response import error_body
from pdserve_router.page import add_page
from pdserve_router.recent import SLICE_S
from pdserve_router.service import Service, build_service
from pdserve_router.workers_view import describe, picture

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499  # nobody reads it; proxies' logs know the number


def create_app(
    settings: RouterSettings, card: ModelCard, *, secret: bytes, clock: Clock, tracer: Tracer
) -> FastAPI:
    """``app.state.service`` has the parts."""
    service = build_service(settings, card, secret=secret, clock=clock, tracer=tracer)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        sessions = asyncio.create_task(service.workers.run())
        yield
        sessions.cancel()
        await asyncio.gather(sessions, return_exceptions=True)

    app = FastAPI(title="pdserve", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(RequestIds)
    app.state.service = service
    _add_openai_routes(app, service)
    _add_operator_routes(app, service)
    add_page(app)
    _add_error_handlers(app)
    return app


def _add_openai_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await service.generate(request, is_chat=False)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await service.generate(request, is_chat=True)

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        service.authorize(request)
        return {"object": "list", "data": [_model(service)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str, request: Request) -> dict[str, Any]:
        service.authorize(request)
        service.parser.check_model(name)
        return _model(service)


def _add_operator_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> Response:
        problems = service.problems()
        body = {"status": "not ready" if problems else "ready", "problems": problems}
        return JSONResponse(body, status_code=503 if problems else 200)

    @app.get("/workers")
    async def workers(request: Request) -> dict[str, Any]:
        service.authorize(request)
        return describe(service.workers)

    @app.get("/system")
    async def system(request: Request) -> dict[str, Any]:
        service.authorize(request)
        return {
            "model": service.model_name,
            "requests": {
                "running": service.intake.num_running,
                "waiting": service.num_waiting(),
            },
            "slice_s": SLICE_S,
            "percentiles_ms": service.recent.percentiles_ms(service.clock.now_s()),
            **picture(service.workers),
        }

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4")


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": 0,
        "owned_by": "pdserve",
        "max_model_len": service.max_context_tokens,
    }


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(PdserveError)
    async def known(request: Request, error: PdserveError) -> Response:
        if not isinstance(error, RequestError | Unauthorized):
            logger.warning("failed path=%s error=%s message=%s", request.url.path, error.label, error)
        return _error_response(error)

    @app.exception_handler(HTTPException)
    async def no_such_route(request: Request, error: HTTPException) -> Response:
        problem = RequestError(f"{request.method} {request.url.path}: {error.detail}")
        return JSONResponse(error_body(problem), status_code=error.status_code, headers=error.headers)

    @app.exception_handler(ClientLeft)
    @app.exception_handler(ClientDisconnect)
    async def nobody_there(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    @app.exception_handler(Exception)
    async def last_resort(request: Request, error: Exception) -> Response:
        logger.error("unexpected path=%s", request.url.path, exc_info=error)
        return _error_response(PdserveError("the server made a mistake; its log says more"))


def _error_response(error: PdserveError) -> Response:
    headers = {}
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    return JSONResponse(error_body(error), status_code=error.http_status, headers=headers)
