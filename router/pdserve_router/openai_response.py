"""OpenAI's answer shapes, built from plain values. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pdserve.errors import PdserveError, RequestError

# JSON has no infinity; this is what OpenAI's API says for "never".
MIN_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class Usage:
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int

    def as_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


@dataclass(frozen=True, slots=True)
class TokenText:
    """``token_bytes`` is what the token adds to the text: nothing, for one that ends it."""

    text: str
    token_bytes: bytes
    logprob: float

    def as_chat_entry(self) -> dict[str, Any]:
        return {"token": self.text, "logprob": self.logprob, "bytes": list(self.token_bytes)}


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """The chosen token, the likeliest ones, and how many characters of text came before."""

    chosen: TokenText
    top: tuple[TokenText, ...]
    text_offset: int


@dataclass(frozen=True, slots=True)
class Piece:
    """The next text of a choice; the one with a ``finish_reason`` is its last."""

    index: int
    text: str
    logprobs: list[TokenChoice] | None
    finish_reason: str = ""


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every body and chunk of one answer starts with."""

    is_chat: bool
    request_id: str
    created_unix_s: int
    model: str

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._body("chat.completion.chunk" if self.is_chat else "text_completion", choices)

    def whole(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._body("chat.completion" if self.is_chat else "text_completion", choices)

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.request_id}",
            "object": kind,
            "created": self.created_unix_s,
            "model": self.model,
            "choices": choices,
        }


def role_choice(index: int) -> dict[str, Any]:
    delta = {"role": "assistant", "content": ""}
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def chunk_choice(piece: Piece, *, is_chat: bool) -> dict[str, Any]:
    if not is_chat:
        return _choice(piece, {"text": piece.text}, is_chat=False)
    has_content = piece.text or not piece.finish_reason
    return _choice(piece, {"delta": {"content": piece.text} if has_content else {}}, is_chat=True)


def whole_choice(piece: Piece, *, is_chat: bool) -> dict[str, Any]:
    if not is_chat:
        return _choice(piece, {"text": piece.text}, is_chat=False)
    message = {"role": "assistant", "content": piece.text, "refusal": None}
    return _choice(piece, {"message": message}, is_chat=True)


def join_pieces(pieces: Sequence[Piece]) -> Piece:
    """All pieces of one choice as one."""
    logprobs = [token for piece in pieces for token in piece.logprobs or ()]
    return Piece(
        index=pieces[0].index,
        text="".join(piece.text for piece in pieces),
        logprobs=None if pieces[-1].logprobs is None else logprobs,
        finish_reason=pieces[-1].finish_reason,
    )


def error_body(error: PdserveError) -> dict[str, Any]:
    kind = "invalid_request_error" if isinstance(error, RequestError) else error.label
    param = error.param if isinstance(error, RequestError) else None
    return {"error": {"message": str(error), "type": kind, "param": param, "code": error.label}}


def _choice(piece: Piece, content: dict[str, Any], *, is_chat: bool) -> dict[str, Any]:
    logprobs = None
    if piece.logprobs is not None:
        logprobs = _chat_logprobs(piece.logprobs) if is_chat else _completion_logprobs(piece.logprobs)
    return {
        "index": piece.index,
        **content,
        "logprobs": logprobs,
        "finish_reason": piece.finish_reason or None,
    }


def _chat_logprobs(tokens: list[TokenChoice]) -> dict[str, Any]:
    return {
        "content": [
            {**token.chosen.as_chat_entry(), "top_logprobs": [other.as_chat_entry() for other in token.top]}
            for token in tokens
        ]
    }


def _completion_logprobs(tokens: list[TokenChoice]) -> dict[str, Any]:
    """The chosen token is always among the alternatives, also when it is not one of the likeliest."""
    return {
        "tokens": [token.chosen.text for token in tokens],
        "token_logprobs": [token.chosen.logprob for token in tokens],
        "top_logprobs": [
            {other.text: other.logprob for other in (token.chosen, *token.top)} for token in tokens
        ],
        "text_offset": [token.text_offset for token in tokens],
    }
