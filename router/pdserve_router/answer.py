"""From a checked request to pieces of text: one task per choice, all ended together.

Each choice detokenizes and looks for stop strings on its own; a match ends it and releases
its workers at once. When one choice fails its siblings are cancelled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from pdserve.clock import Clock
from pdserve.errors import DeadlineExceeded, PdserveError
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.sampling import choice_seed
from pdserve.timeline import Timeline
from pdserve_router.detokenizer import Detokenizer
from pdserve_router.generation import Generation, Progress, SequenceRequest
from pdserve_router.merge import Tokens
from pdserve_router.openai_response import TokenText, Usage
from pdserve_router.parse import GenerationRequest, Prompt
from pdserve_router.stop_strings import StopMatcher
from pdserve_router.tokenizer import Tokenizer

# A client that reads slowly holds up its own generation, nobody else's.
MAX_PIECES_WAITING = 256


@dataclass(frozen=True, slots=True)
class Piece:
    """The next text of a choice; the one with a ``finish_reason`` is its last."""

    index: int
    text: str
    logprobs: list[TokenText] | None
    finish_reason: str = ""


@dataclass(slots=True)
class Choice:
    index: int
    prompt: Prompt
    request: SequenceRequest
    progress: Progress = field(default_factory=Progress)


@dataclass(slots=True)
class Answer:
    """The choices of one request, and what is known of them when they have ended."""

    request: GenerationRequest
    choices: list[Choice]
    created_unix_s: int

    def usage(self) -> Usage:
        """Prompt tokens once per prompt, output tokens over all choices."""
        first_samples = self.choices[:: self.request.n]
        return Usage(
            num_prompt_tokens=sum(len(choice.prompt.token_ids) for choice in first_samples),
            num_output_tokens=sum(len(choice.progress.output_token_ids) for choice in self.choices),
            num_cached_tokens=sum(choice.progress.num_cached_tokens or 0 for choice in first_samples),
        )


def new_answer(request: GenerationRequest, *, request_id: str, clock: Clock, traceparent: str) -> Answer:
    received_s = clock.now_s()
    choices: list[Choice] = []
    for prompt in request.prompts:
        for sample in range(request.n):
            index = len(choices)
            seed = choice_seed(request.sampling.seed, sample)
            sequence = SequenceRequest(
                request_id=f"{request_id}-{index}",
                prompt_token_ids=prompt.token_ids,
                sampling=replace(request.sampling, seed=seed),
                timeline=Timeline(received_s),
                traceparent=traceparent,
            )
            choices.append(Choice(index, prompt, sequence))
    return Answer(request, choices, int(time.time()))


class Answerer:
    def __init__(
        self, generation: Generation, tokenizer: Tokenizer, *, clock: Clock, request_limit_s: float
    ) -> None:
        self._generation = generation
        self._tokenizer = tokenizer
        self._clock = clock
        self._request_limit_s = request_limit_s

    async def pieces(self, answer: Answer) -> AsyncGenerator[Piece, None]:
        """Of all choices as they come. Raises the first ``PdserveError``; closing it ends everything."""
        pieces: asyncio.Queue[Piece | PdserveError] = asyncio.Queue(MAX_PIECES_WAITING)
        tasks = [asyncio.create_task(self._run(choice, answer.request, pieces)) for choice in answer.choices]
        try:
            num_open = len(tasks)
            while num_open:
                piece = await pieces.get()
                if isinstance(piece, PdserveError):
                    raise piece
                num_open -= bool(piece.finish_reason)
                yield piece
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(
        self, choice: Choice, request: GenerationRequest, pieces: asyncio.Queue[Piece | PdserveError]
    ) -> None:
        """Ends with a finishing piece or with an error in the queue, never silently."""
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
        detokenizer = Detokenizer(self._tokenizer.fast)
        matcher = StopMatcher(request.stops)
        if choice.prompt.echo_text:
            yield Piece(choice.index, choice.prompt.echo_text, None)
        pending: list[TokenText] = []
        async with aclosing(self._generation.tokens(choice.request, choice.progress)) as stream:
            async for tokens in stream:
                text = matcher.add(detokenizer.add(_shown(tokens, request)))
                pending += self._logprobs(tokens, request)
                reason = tokens.finish_reason
                if reason and not matcher.matched:
                    text += matcher.add(detokenizer.flush())
                    text += matcher.flush()
                if matcher.matched:
                    reason = "stop"
                if text or reason:
                    wants_logprobs = request.sampling.num_logprobs is not None
                    yield Piece(choice.index, text, pending if wants_logprobs else None, reason)
                    pending = []
                if reason:
                    return

    def _logprobs(self, tokens: Tokens, request: GenerationRequest) -> list[TokenText]:
        if request.sampling.num_logprobs is None:
            return []
        pairs = zip(tokens.token_ids, tokens.logprobs, strict=True)
        return [self._token_text(token_id, entry) for token_id, entry in pairs]

    def _token_text(self, token_id: int, entry: pb.TokenLogprobs) -> TokenText:
        top = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
        return TokenText(
            self._tokenizer.token_bytes(token_id),
            entry.logprob,
            tuple((self._tokenizer.token_bytes(other), logprob) for other, logprob in top),
        )


def _shown(tokens: Tokens, request: GenerationRequest) -> tuple[int, ...]:
    """A stop token ends the text and is not part of it."""
    stops = request.sampling.stop_token_ids
    if tokens.finish_reason == "stop" and tokens.token_ids and tokens.token_ids[-1] in stops:
        return tokens.token_ids[:-1]
    return tokens.token_ids
