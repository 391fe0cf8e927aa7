"""Token ids to text, a few at a time, never half a character. Pure.

The pieces joined equal the whole decoded at once: what a later token completes is held back,
and what is still incomplete at the end comes out with ``flush``.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import DecodeStream


class Detokenizer:
    def __init__(self, tokenizer: FastTokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._token_ids: list[int] = []
        self._emitted = ""

    def add(self, token_ids: Iterable[int]) -> str:
        """The text that is certain now and was not before."""
        pieces = []
        for token_id in token_ids:
            self._token_ids.append(token_id)
            piece = self._stream.step(self._tokenizer, token_id)
            if piece:
                pieces.append(piece)
        text = "".join(pieces)
        self._emitted += text
        return text

    def flush(self) -> str:
        """What was held back; the last call."""
        whole = str(self._tokenizer.decode(self._token_ids, skip_special_tokens=True))
        return whole[len(self._emitted) :] if whole.startswith(self._emitted) else ""
