"""Pieces of text to HTTP: a stream of events, or one body when all is there."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from pdserve.errors import PdserveError
from pdserve_router.answer import Answer
from pdserve_router.openai_response import (
    Envelope,
    Piece,
    chunk_choice,
    error_body,
    join_pieces,
    role_choice,
    whole_choice,
)
from pdserve_router.sse import DONE, event


async def whole_body(
    answer: Answer, envelope: Envelope, pieces: AsyncGenerator[Piece, None]
) -> dict[str, Any]:
    """Of an answer that is not streamed. Raises ``PdserveError``."""
    own: list[list[Piece]] = [[] for _ in answer.choices]
    async with aclosing(pieces):
        async for piece in pieces:
            own[piece.index].append(piece)
    choices = [whole_choice(join_pieces(part), is_chat=envelope.is_chat) for part in own]
    return envelope.whole(choices) | _closing(answer)


async def events(
    answer: Answer, envelope: Envelope, first: Piece, rest: AsyncGenerator[Piece, None]
) -> AsyncGenerator[bytes, None]:
    """Of an answer whose first piece is there: what fails before it deserves a status code.

    A later error is one event and the end, without [DONE]: the answer is not whole.
    """
    try:
        async with aclosing(rest):
            if envelope.is_chat:
                for choice in answer.choices:
                    yield event(envelope.chunk([role_choice(choice.index)]))
            yield _chunk(first, envelope)
            async for piece in rest:
                yield _chunk(piece, envelope)
    except PdserveError as error:
        yield event(error_body(error))
        return
    if answer.request.include_usage or answer.request.include_timing:
        yield event(envelope.chunk([]) | _closing(answer))
    yield DONE


def _chunk(piece: Piece, envelope: Envelope) -> bytes:
    return event(envelope.chunk([chunk_choice(piece, is_chat=envelope.is_chat)]))


def _closing(answer: Answer) -> dict[str, Any]:
    """What is known when all choices have ended."""
    usage = {"usage": answer.usage().as_dict()}
    return usage | ({"pdserve": _timing(answer)} if answer.request.include_timing else {})


def _timing(answer: Answer) -> dict[str, Any]:
    """Of the first choice, in milliseconds: what benchmarks and curious people want."""
    first = answer.choices[0]
    timeline, report = first.request.timeline, first.progress.handoff
    block: dict[str, Any] = {
        "queue_ms": _ms(timeline.queue_s),
        "ttft_ms": _ms(timeline.ttft_s),
        "handoff_gap_ms": _ms(timeline.handoff_gap_s),
        "token_times_ms": [_ms(time_s - timeline.received_s) for time_s in timeline.token_times_s],
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
    return block


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
