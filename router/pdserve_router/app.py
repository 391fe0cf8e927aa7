"""The HTTP surface: routes, bodies, errors, disconnects. What they mean is decided elsewhere.

Importing this module starts nothing. ``create_app`` puts the parts together; the sessions
with the workers live as long as the application does.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from pdserve.clock import Clock, MonotonicClock
from pdserve.errors import BodyTooLarge, Overloaded, PdserveError, RequestError, Unauthorized
from pdserve.model_card import ModelCard
from pdserve_router.admission import Admission
from pdserve_router.answer import Answer, Answerer, Piece, new_answer
from pdserve_router.chat_template import ChatTemplate
from pdserve_router.config import RouterSettings
from pdserve_router.generation import Generation
from pdserve_router.metrics import RouterMetrics
from pdserve_router.openai_response import Envelope, choice, error_body, role_choice
from pdserve_router.parse import RequestParser
from pdserve_router.sse import DONE, EventStream, event, wait_for_disconnect
from pdserve_router.tokenizer import Tokenizer
from pdserve_router.workers import Workers

logger = logging.getLogger(__name__)

MAX_CLIENT_ID_CHARACTERS = 128
DISCONNECTED = "disconnected"


@dataclass(slots=True)
class Services:
    """The parts of a running router, built once."""

    settings: RouterSettings
    card: ModelCard
    model_name: str
    workers: Workers
    parser: RequestParser
    answerer: Answerer
    metrics: RouterMetrics
    clock: Clock
    is_draining: bool = False

    async def wait_idle(self) -> None:
        """Until no request is being served."""
        while self.metrics.num_running:
            await self.workers.wait_for_change(1.0)


def create_app(settings: RouterSettings, card: ModelCard, *, secret: bytes) -> FastAPI:
    services = _build(settings, card, secret)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        sessions = asyncio.create_task(services.workers.run())
        yield
        sessions.cancel()
        await asyncio.gather(sessions, return_exceptions=True)

    app = FastAPI(title="pdserve", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.services = services
    _add_routes(app, services)
    _add_error_handlers(app, services)
    return app


def _build(settings: RouterSettings, card: ModelCard, secret: bytes) -> Services:
    clock = MonotonicClock()
    tokenizer = Tokenizer(card)
    model_name = settings.served_model_name or card.name
    workers = Workers(prefill=settings.prefill_workers, decode=settings.decode_workers, secret=secret)
    admission = Admission(max_queue=settings.max_queue)
    generation = Generation(workers, admission, clock=clock, queue_limit_s=settings.queue_limit_s)
    return Services(
        settings=settings,
        card=card,
        model_name=model_name,
        workers=workers,
        parser=RequestParser(
            card, model_name=model_name, tokenizer=tokenizer, chat_template=ChatTemplate(card)
        ),
        answerer=Answerer(generation, tokenizer, clock=clock, request_limit_s=settings.request_limit_s),
        metrics=RouterMetrics(workers, lambda: admission.num_waiting),
        clock=clock,
    )


def _add_routes(app: FastAPI, services: Services) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _generate(request, services, is_chat=False)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await _generate(request, services, is_chat=True)

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        _authorize(request, services)
        return {"object": "list", "data": [_model(services)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str, request: Request) -> dict[str, Any]:
        _authorize(request, services)
        services.parser.check_model(name)
        return _model(services)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> Response:
        problems = ["the router is shutting down"] if services.is_draining else services.workers.problems()
        body = {"status": "not ready" if problems else "ready", "problems": problems}
        return JSONResponse(body, status_code=503 if problems else 200)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(services.metrics.render(), media_type="text/plain; version=0.0.4")


def _model(services: Services) -> dict[str, Any]:
    context = services.workers.max_context_tokens or services.card.max_context_tokens
    return {
        "id": services.model_name,
        "object": "model",
        "created": 0,
        "owned_by": "pdserve",
        "max_model_len": context,
    }


# ------------------------------------------------------------------ generation


async def _generate(request: Request, services: Services, *, is_chat: bool) -> Response:
    headers = {"x-request-id": _client_id(request)}
    _authorize(request, services)
    if services.is_draining:
        raise Overloaded("the router is shutting down", retry_after_s=1.0)
    body = await _read_body(request, services.settings.max_body_bytes)
    context = services.workers.max_context_tokens or services.card.max_context_tokens
    parse = services.parser.chat if is_chat else services.parser.completion
    parsed = parse(body, context)
    request_id = secrets.token_hex(12)
    logger.info(
        "request request_id=%s client_id=%s prompts=%d n=%d num_prompt_tokens=%d max_tokens=%d stream=%s",
        request_id,
        headers["x-request-id"],
        len(parsed.prompts),
        parsed.n,
        sum(len(prompt.token_ids) for prompt in parsed.prompts),
        parsed.sampling.max_tokens,
        parsed.is_stream,
    )
    answer = new_answer(
        parsed,
        request_id=request_id,
        clock=services.clock,
        traceparent=request.headers.get("traceparent", "")[:64],
    )
    envelope = Envelope(parsed.is_chat, request_id, answer.created_unix_s, services.model_name)
    pieces = _accounted(services, answer, request_id)
    if not parsed.is_stream:
        return await _whole(request, answer, envelope, pieces, headers)
    # Errors before the first piece are real status codes, so the stream starts with it.
    first = await _unless_disconnected(request, anext(pieces))
    if first is None:
        await pieces.aclose()
        return Response(status_code=499)
    return EventStream(_events(answer, envelope, first, pieces), headers)


async def _accounted(services: Services, answer: Answer, request_id: str) -> AsyncGenerator[Piece, None]:
    """The answer's pieces; however they end, that is counted once."""
    outcome = DISCONNECTED
    services.metrics.num_running += 1
    try:
        async with aclosing(services.answerer.pieces(answer)) as pieces:
            async for piece in pieces:
                yield piece
        outcome = "ok"
    except PdserveError as error:
        outcome = error.label
        raise
    finally:
        services.metrics.num_running -= 1
        services.metrics.ended(answer, outcome)
        logger.info(
            "ended request_id=%s outcome=%s num_output_tokens=%d",
            request_id,
            outcome,
            answer.usage().num_output_tokens,
        )


async def _events(
    answer: Answer, envelope: Envelope, first: Piece, rest: AsyncGenerator[Piece, None]
) -> AsyncGenerator[bytes, None]:
    request = answer.request
    offsets = dict.fromkeys(range(len(answer.choices)), 0)
    if request.is_chat:
        for index in offsets:
            yield event(envelope.body([role_choice(index)], is_chunk=True))
    try:
        async with aclosing(rest):
            async for piece in _chain(first, rest):
                shown = choice(
                    is_chat=request.is_chat,
                    is_chunk=True,
                    index=piece.index,
                    text=piece.text,
                    finish_reason=piece.finish_reason,
                    logprobs=piece.logprobs,
                    text_offset=offsets[piece.index],
                )
                offsets[piece.index] += len(piece.text)
                yield event(envelope.body([shown], is_chunk=True))
    except PdserveError as error:
        yield event(error_body(error))  # and no [DONE]: the answer is not whole
        return
    if request.include_usage or request.include_timing:
        final = envelope.body([], is_chunk=True) | {"usage": answer.usage().as_dict()}
        yield event(final | (_timing(answer) if request.include_timing else {}))
    yield DONE


async def _chain(first: Piece, rest: AsyncIterator[Piece]) -> AsyncIterator[Piece]:
    yield first
    async for piece in rest:
        yield piece


async def _whole(
    request: Request,
    answer: Answer,
    envelope: Envelope,
    pieces: AsyncGenerator[Piece, None],
    headers: dict[str, str],
) -> Response:
    collected = await _unless_disconnected(request, _collect(pieces))
    if collected is None:
        return Response(status_code=499)
    choices = [
        choice(
            is_chat=envelope.is_chat,
            is_chunk=False,
            index=index,
            text="".join(piece.text for piece in own),
            finish_reason=own[-1].finish_reason,
            logprobs=None
            if answer.request.sampling.num_logprobs is None
            else [token for piece in own for token in piece.logprobs or ()],
        )
        for index, own in sorted(collected.items())
    ]
    body = envelope.body(choices, is_chunk=False) | {"usage": answer.usage().as_dict()}
    return JSONResponse(body | (_timing(answer) if answer.request.include_timing else {}), headers=headers)


async def _collect(pieces: AsyncGenerator[Piece, None]) -> dict[int, list[Piece]]:
    collected: dict[int, list[Piece]] = {}
    async with aclosing(pieces):
        async for piece in pieces:
            collected.setdefault(piece.index, []).append(piece)
    return collected


def _timing(answer: Answer) -> dict[str, Any]:
    """Of the first choice, in milliseconds: what benchmarks and curious people want."""
    first = answer.choices[0]
    timeline, report = first.request.timeline, first.progress.handoff
    times = timeline.token_times_s
    block: dict[str, Any] = {
        "ttft_ms": _ms(timeline.ttft_s),
        "handoff_gap_ms": _ms(timeline.handoff_gap_s),
        "token_times_ms": [_ms(time_s - timeline.received_s) for time_s in times],
        "attempts": first.progress.num_attempts,
    }
    if report is not None:
        block |= {
            "transport": report.transport,
            "num_bytes": report.num_bytes,
            "transfer_ms": round(report.transfer_ms, 3),
            "hidden_transfer_ms": round(report.hidden_transfer_ms, 3),
            "prefill_queue_ms": round(report.queue_ms, 3),
            "prefill_ms": round(report.prefill_ms, 3),
        }
    return {"pdserve": block}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


# ------------------------------------------------------------------- requests


async def _unless_disconnected(request: Request, work: Any) -> Any:
    """The result, or None when the client left first; then the work is cancelled."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.create_task(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _read_body(request: Request, limit: int) -> bytes:
    """Counts what arrives, whatever Content-Length claims. Raises ``BodyTooLarge``."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise BodyTooLarge(f"the body is over the limit of {limit} bytes")
    return bytes(body)


def _authorize(request: Request, services: Services) -> None:
    keys = services.settings.api_keys
    if not keys:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    matches = [hmac.compare_digest(given.encode(), key.encode()) for key in keys]
    if scheme.lower() != "bearer" or not any(matches):
        raise Unauthorized("a valid API key is needed: Authorization: Bearer KEY")


def _client_id(request: Request) -> str:
    """The client's own id, only echoed and logged: bounded and harmless in a header."""
    given = request.headers.get("x-request-id", "")
    return re.sub(r"[^A-Za-z0-9._:/-]", "_", given)[:MAX_CLIENT_ID_CHARACTERS] or secrets.token_hex(8)


# --------------------------------------------------------------------- errors


def _add_error_handlers(app: FastAPI, services: Services) -> None:
    @app.exception_handler(PdserveError)
    async def known(request: Request, error: PdserveError) -> Response:
        if not isinstance(error, RequestError | Unauthorized):
            logger.warning("failed path=%s error=%s message=%s", request.url.path, error.label, error)
        return _error_response(error)

    @app.exception_handler(HTTPException)
    async def no_such_route(request: Request, error: HTTPException) -> Response:
        problem = RequestError(f"{request.method} {request.url.path}: {error.detail}")
        return JSONResponse(error_body(problem), status_code=error.status_code, headers=error.headers)

    @app.exception_handler(Exception)
    async def last_resort(request: Request, error: Exception) -> Response:
        logger.exception("unexpected path=%s", request.url.path, exc_info=error)
        return _error_response(PdserveError("the server made a mistake; its log says more"))


def _error_response(error: PdserveError) -> Response:
    headers = {}
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    return JSONResponse(error_body(error), status_code=error.http_status, headers=headers)
