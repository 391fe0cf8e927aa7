"""From the tokens of one choice to pieces of text: detokenized, cut at stop strings, with logprobs. Pure."""

from __future__ import annotations

import codecs
from collections.abc import Set

from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve_router.detokenizer import Detokenizer
from pdserve_router.merge import Tokens
from pdserve_router.openai_response import MIN_LOGPROB, Piece, TokenChoice, TokenText
from pdserve_router.stop_strings import StopMatcher
from pdserve_router.tokenizer import Tokenizer


class ChoiceText:
    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        *,
        prefix: str,
        stops: tuple[str, ...],
        stop_token_ids: Set[int],
        wants_logprobs: bool,
    ) -> None:
        """``prefix`` comes before the first token (echo). ``stop_token_ids`` end the text, unseen."""
        self._index = index
        self._tokenizer = tokenizer
        self._prefix = prefix
        self._stop_token_ids = stop_token_ids
        self._detokenizer = Detokenizer(tokenizer)
        self._matcher = StopMatcher(stops)
        self._logprobs = _Logprobs(tokenizer, len(prefix)) if wants_logprobs else None

    def add(self, tokens: Tokens) -> Piece | None:
        """None while nothing can be shown yet; a piece with a finish reason is the last."""
        num_shown = self._num_shown(tokens)
        text = self._matcher.add(self._detokenizer.add(tokens.token_ids[:num_shown]))
        if tokens.finish_reason:
            text += self._matcher.add(self._detokenizer.flush()) + self._matcher.flush()
        if self._logprobs is not None:
            self._logprobs.add(tokens, num_shown)
        reason = "stop" if self._matcher.matched else tokens.finish_reason
        text, self._prefix = self._prefix + text, ""
        if not text and not reason:
            return None
        logprobs = None if self._logprobs is None else self._logprobs.take()
        return Piece(self._index, text, logprobs, reason)

    def _num_shown(self, tokens: Tokens) -> int:
        token_ids = tokens.token_ids
        is_stopped = tokens.finish_reason == "stop" and token_ids and token_ids[-1] in self._stop_token_ids
        return len(token_ids) - bool(is_stopped)


class _Logprobs:
    """Entries wait for the piece that has their text."""

    def __init__(self, tokenizer: Tokenizer, text_offset: int) -> None:
        self._tokenizer = tokenizer
        self._text_offset = text_offset
        self._characters = codecs.getincrementaldecoder("utf-8")("ignore")
        self._waiting: list[TokenChoice] = []

    def add(self, tokens: Tokens, num_shown: int) -> None:
        for place, (token_id, entry) in enumerate(zip(tokens.token_ids, tokens.logprobs, strict=True)):
            self._waiting.append(self._entry(token_id, entry, is_shown=place < num_shown))

    def take(self) -> list[TokenChoice]:
        taken, self._waiting = self._waiting, []
        return taken

    def _entry(self, token_id: int, entry: pb.TokenLogprobs, *, is_shown: bool) -> TokenChoice:
        chosen = self._token_text(token_id, entry.logprob)
        if not is_shown:
            chosen = TokenText(chosen.text, b"", chosen.logprob)
        top = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
        offset = self._text_offset
        self._text_offset += len(self._characters.decode(chosen.token_bytes))
        return TokenChoice(chosen, tuple(self._token_text(*other) for other in top), offset)

    def _token_text(self, token_id: int, logprob: float) -> TokenText:
        token_bytes = self._tokenizer.token_bytes(token_id)
        text = self._tokenizer.token_text(token_id) or _readable(token_bytes)
        return TokenText(text, token_bytes, max(logprob, MIN_LOGPROB))


def _readable(token_bytes: bytes) -> str:
    """A piece of a character is shown as ``bytes:\\xNN``, so that two pieces stay two."""
    try:
        return token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)
