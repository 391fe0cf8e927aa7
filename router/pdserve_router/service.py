"""The parts of a running router, built once, and the way of a request through them."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import ExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pdserve.clock import Clock
from pdserve.errors import PdserveError
from pdserve.model_card import ModelCard
from pdserve.tracing import Tracer
from pdserve_router.admission import Admission
from pdserve_router.answer import Answer, Answerer, new_answer
from pdserve_router.chat_template import ChatTemplate
from pdserve_router.config import RouterSettings
from pdserve_router.generation import Generation
from pdserve_router.http_request import check_key, read_body, unless_client_leaves
from pdserve_router.intake import Intake
from pdserve_router.metrics import RouterMetrics
from pdserve_router.openai_response import Envelope, Piece
from pdserve_router.parse import GenerationRequest, RequestParser
from pdserve_router.recent import Recent
from pdserve_router.respond import events, whole_body
from pdserve_router.sse import EventStream
from pdserve_router.tokenizer import Tokenizer
from pdserve_router.workers import Workers

logger = logging.getLogger(__name__)

# The format has 55; a later version of it may have more.
MAX_TRACEPARENT_CHARACTERS = 64
DISCONNECTED = "disconnected"


@dataclass(frozen=True, slots=True)
class Service:
    settings: RouterSettings
    card: ModelCard
    model_name: str
    workers: Workers
    parser: RequestParser
    answerer: Answerer
    intake: Intake
    num_waiting: Callable[[], int]
    metrics: RouterMetrics
    recent: Recent
    clock: Clock
    tracer: Tracer

    @property
    def max_context_tokens(self) -> int:
        """The least that the model and every ready worker can hold."""
        return min(
            self.card.max_context_tokens, self.workers.max_context_tokens or self.card.max_context_tokens
        )

    def problems(self) -> list[str]:
        """Why this router should get no requests now; empty when it should."""
        return self.workers.problems() if self.intake.is_open else ["the router is shutting down"]

    def authorize(self, request: Request) -> None:
        check_key(request, self.settings.api_keys)

    async def generate(self, request: Request, *, is_chat: bool) -> Response:
        """Raises ``PdserveError`` for what fails before the first token, ``ClientLeft`` when nobody waits."""
        async with self._accepted(request, is_chat=is_chat) as answer:
            envelope = Envelope(is_chat, answer.request_id, answer.created_unix_s, self.model_name)
            pieces = self._accounted(answer)
            if not answer.request.is_stream:
                body = await unless_client_leaves(request, whole_body(answer, envelope, pieces))
                return JSONResponse(body)
            first = await unless_client_leaves(request, anext(pieces))
            return EventStream(events(answer, envelope, first, pieces))

    @asynccontextmanager
    async def _accepted(self, request: Request, *, is_chat: bool) -> AsyncIterator[Answer]:
        """Until it is left the router does not end; by then the answer is whole or counted as running."""
        with ExitStack() as accepting:
            try:
                self.authorize(request)
                accepting.enter_context(self.intake.accepting())
                answer = await self._accept(request, is_chat=is_chat)
            except PdserveError as error:
                self.metrics.refused(error.label)
                raise
            yield answer

    async def _accept(self, request: Request, *, is_chat: bool) -> Answer:
        """Everything that can be refused without asking a worker."""
        received_s = self.clock.now_s()
        body = await read_body(request, self.settings.max_body_bytes)
        parse = self.parser.chat if is_chat else self.parser.completion
        # On a thread: a long text takes the tokenizer longer than the next token of other requests.
        parsed = await asyncio.to_thread(parse, body, self.max_context_tokens)
        request_id = secrets.token_hex(12)
        parent = request.headers.get("traceparent", "")[:MAX_TRACEPARENT_CHARACTERS]
        span = self.tracer.begin("request", parent=parent, request_id=request_id)
        answer = new_answer(parsed, request_id=request_id, received_s=received_s, span=span)
        _log_start(answer, parsed, request.state.client_id)
        return answer

    async def _accounted(self, answer: Answer) -> AsyncGenerator[Piece, None]:
        """The answer's pieces; however they end, that is counted once."""
        outcome = DISCONNECTED
        with self.intake.running():
            try:
                async with aclosing(self.answerer.pieces(answer)) as pieces:
                    async for piece in pieces:
                        yield piece
                outcome = "ok"
            except PdserveError as error:
                outcome = error.label
                raise
            finally:
                self.metrics.ended(answer, outcome)
                self._remember(answer)
                answer.span.end(outcome)
                num_output_tokens = answer.usage().num_output_tokens
                logger.info(
                    "ended request_id=%s outcome=%s num_output_tokens=%d",
                    answer.request_id,
                    outcome,
                    num_output_tokens,
                )

    def _remember(self, answer: Answer) -> None:
        for choice in answer.choices:
            self.recent.ended(choice.request.timeline, self.clock.now_s())


def build_service(
    settings: RouterSettings, card: ModelCard, *, secret: bytes, clock: Clock, tracer: Tracer
) -> Service:
    tokenizer = Tokenizer(card)
    model_name = settings.served_model_name or card.name
    workers = Workers(prefill=settings.prefill_workers, decode=settings.decode_workers, secret=secret)
    admission = Admission(max_queue=settings.max_queue)
    intake = Intake()
    return Service(
        settings=settings,
        card=card,
        model_name=model_name,
        workers=workers,
        parser=RequestParser(
            card, model_name=model_name, tokenizer=tokenizer, chat_template=ChatTemplate(card)
        ),
        answerer=Answerer(
            Generation(workers, admission, clock=clock, tracer=tracer, queue_limit_s=settings.queue_limit_s),
            tokenizer,
            eos_token_ids=card.eos_token_ids,
            clock=clock,
            request_limit_s=settings.request_limit_s,
        ),
        intake=intake,
        num_waiting=lambda: admission.num_waiting,
        metrics=RouterMetrics(
            workers, num_running=lambda: intake.num_running, num_waiting=lambda: admission.num_waiting
        ),
        recent=Recent(),
        clock=clock,
        tracer=tracer,
    )


def _log_start(answer: Answer, parsed: GenerationRequest, client_id: str) -> None:
    logger.info(
        "request request_id=%s client_id=%s prompts=%d n=%d num_prompt_tokens=%d max_tokens=%d stream=%s",
        answer.request_id,
        client_id,
        len(parsed.prompts),
        parsed.n,
        sum(len(prompt.token_ids) for prompt in parsed.prompts),
        parsed.sampling.max_tokens,
        parsed.is_stream,
    )
