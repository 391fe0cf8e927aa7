"""From a checked request to pieces of text: one task per choice, all ended together.

A stop string ends its choice and releases its workers at once. When one choice fails its
siblings are cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial

from pdserve.clock import Clock
from pdserve.errors import DeadlineExceeded, PdserveError
from pdserve.sampling import choice_seed
from pdserve.timeline import Timeline
from pdserve.tracing import Span
from pdserve_router.attempt import Progress, SequenceRequest
from pdserve_router.choice_text import ChoiceText
from pdserve_router.generation import Generation
from pdserve_router.openai_response import Piece, Usage
from pdserve_router.parse import GenerationRequest, Prompt
from pdserve_router.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# A client that reads slowly holds up its own generation, nobody else's.
MAX_PIECES_WAITING = 256

PieceQueue = asyncio.Queue[Piece | PdserveError]


@dataclass(slots=True)
class Choice:
    index: int
    prompt: Prompt
    request: SequenceRequest
    progress: Progress = field(default_factory=Progress)


@dataclass(slots=True)
class Answer:
    """The choices of one request, and what is known of them when they have ended."""

    request_id: str
    request: GenerationRequest
    choices: list[Choice]
    created_unix_s: int
    span: Span

    def usage(self) -> Usage:
        """Prompt tokens once per prompt, output tokens over all choices."""
        first_samples = self.choices[:: self.request.n]
        return Usage(
            num_prompt_tokens=sum(len(choice.prompt.token_ids) for choice in first_samples),
            num_output_tokens=sum(len(choice.progress.output_token_ids) for choice in self.choices),
            num_cached_tokens=sum(choice.progress.num_cached_tokens or 0 for choice in first_samples),
        )


def new_answer(request: GenerationRequest, *, request_id: str, received_s: float, span: Span) -> Answer:
    choices: list[Choice] = []
    for prompt in request.prompts:
        for sample in range(request.n):
            index = len(choices)
            sequence = SequenceRequest(
                request_id=f"{request_id}-{index}",
                prompt_token_ids=prompt.token_ids,
                sampling=replace(request.sampling, seed=choice_seed(request.sampling.seed, sample)),
                timeline=Timeline(received_s),
                traceparent=span.traceparent,
            )
            choices.append(Choice(index, prompt, sequence))
    return Answer(request_id, request, choices, int(time.time()), span)


class Answerer:
    def __init__(
        self,
        generation: Generation,
        tokenizer: Tokenizer,
        *,
        eos_token_ids: frozenset[int],
        clock: Clock,
        request_limit_s: float,
    ) -> None:
        self._generation = generation
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._clock = clock
        self._request_limit_s = request_limit_s
        self._open: set[PieceQueue] = set()

    async def pieces(self, answer: Answer) -> AsyncGenerator[Piece, None]:
        """Of all choices as they come. Raises the first ``PdserveError``; closing it ends everything."""
        pieces: PieceQueue = asyncio.Queue(MAX_PIECES_WAITING)
        self._open.add(pieces)
        tasks = [asyncio.create_task(self._run(choice, answer.request, pieces)) for choice in answer.choices]
        for task in tasks:
            task.add_done_callback(partial(_never_silent, pieces))
        try:
            num_open = len(tasks)
            while num_open:
                piece = await pieces.get()
                if isinstance(piece, PdserveError):
                    raise piece
                num_open -= bool(piece.finish_reason)
                yield piece
        finally:
            self._open.discard(pieces)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def cut_all(self, error: PdserveError) -> None:
        """Every answer under way ends with ``error``."""
        for pieces in self._open:
            _cut(pieces, error)

    async def _run(self, choice: Choice, request: GenerationRequest, pieces: PieceQueue) -> None:
        """Ends with a finishing piece or with an error in the queue."""
        try:
            async with asyncio.timeout(self._request_limit_s), aclosing(self._choice(choice, request)) as own:
                async for piece in own:
                    await pieces.put(piece)
        except PdserveError as error:
            await pieces.put(error)
        except TimeoutError:
            await pieces.put(DeadlineExceeded(f"the request took longer than {self._request_limit_s:g} s"))
        choice.request.timeline.finished_s = self._clock.now_s()

    async def _choice(self, choice: Choice, request: GenerationRequest) -> AsyncGenerator[Piece, None]:
        text = ChoiceText(
            choice.index,
            self._tokenizer,
            prefix=choice.prompt.echo_text,
            stops=request.stops,
            stop_token_ids=self._eos_token_ids.union(request.sampling.stop_token_ids),
            wants_logprobs=request.sampling.num_logprobs is not None,
        )
        async with aclosing(self._generation.tokens(choice.request, choice.progress)) as stream:
            async for tokens in stream:
                piece = text.add(tokens)
                if piece is not None:
                    yield piece
                    if piece.finish_reason:
                        return


def _never_silent(pieces: PieceQueue, task: asyncio.Task[None]) -> None:
    """A mistake of ours in a choice's task ends the answer too."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("choice_failed", exc_info=error)
        _cut(pieces, PdserveError("the server made a mistake; its log says more"))


def _cut(pieces: PieceQueue, error: PdserveError) -> None:
    """What waits to be sent is dropped: the answer will not be whole anyway."""
    while not pieces.empty():
        pieces.get_nowait()
    pieces.put_nowait(error)
