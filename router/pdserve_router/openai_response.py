"""OpenAI's answer shapes, built from plain values. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pdserve.errors import PdserveError, RequestError


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
    """One token with its log-probability and alternatives, as text and bytes."""

    token_bytes: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every body and chunk of one answer starts with."""

    is_chat: bool
    request_id: str
    created_unix_s: int
    model: str

    def body(self, choices: list[dict[str, Any]], *, is_chunk: bool) -> dict[str, Any]:
        kind = "text_completion"
        if self.is_chat:
            kind = "chat.completion.chunk" if is_chunk else "chat.completion"
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        return {
            "id": f"{prefix}-{self.request_id}",
            "object": kind,
            "created": self.created_unix_s,
            "model": self.model,
            "choices": choices,
        }


def choice(
    *,
    is_chat: bool,
    is_chunk: bool,
    index: int,
    text: str,
    finish_reason: str,
    logprobs: list[TokenText] | None,
    text_offset: int = 0,
) -> dict[str, Any]:
    """``text_offset``: characters of the choice's text before these tokens (completions only)."""
    content: dict[str, Any]
    if not is_chat:
        content = {"text": text}
    elif is_chunk:
        content = {"delta": {"content": text} if text or not finish_reason else {}}
    else:
        content = {"message": {"role": "assistant", "content": text}}
    shown = None
    if logprobs is not None:
        shown = _chat_logprobs(logprobs) if is_chat else _completion_logprobs(logprobs, text_offset)
    return {"index": index, **content, "logprobs": shown, "finish_reason": finish_reason or None}


def role_choice(index: int) -> dict[str, Any]:
    delta = {"role": "assistant", "content": ""}
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _chat_logprobs(tokens: list[TokenText]) -> dict[str, Any]:
    return {
        "content": [
            {
                **_chat_entry(token.token_bytes, token.logprob),
                "top_logprobs": [_chat_entry(*alternative) for alternative in token.top],
            }
            for token in tokens
        ]
    }


def _chat_entry(token_bytes: bytes, logprob: float) -> dict[str, Any]:
    return {"token": _readable(token_bytes), "logprob": logprob, "bytes": list(token_bytes)}


def _completion_logprobs(tokens: list[TokenText], text_offset: int) -> dict[str, Any]:
    offsets = []
    for token in tokens:
        offsets.append(text_offset)
        text_offset += len(_readable(token.token_bytes))
    return {
        "tokens": [_readable(token.token_bytes) for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [
            {_readable(token_bytes): logprob for token_bytes, logprob in token.top} for token in tokens
        ],
        "text_offset": offsets,
    }


def _readable(token_bytes: bytes) -> str:
    """A piece of a character is shown as ``bytes:\\xNN``, so that two pieces stay two."""
    try:
        return token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


def error_body(error: PdserveError) -> dict[str, Any]:
    kind = "invalid_request_error" if isinstance(error, RequestError) else error.label
    param = error.param if isinstance(error, RequestError) else None
    return {"error": {"message": str(error), "type": kind, "param": param, "code": error.label}}
