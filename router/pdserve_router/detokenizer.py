"""Token ids to text, a few at a time, never half a character. Pure.

The pieces joined equal the whole decoded at once. Two things make that hard: a decoder looks
at neighbours (a leading space is dropped, bytes make up a character), and it judges a run of
byte tokens as a whole. So text is cut only where nothing that follows can change it::

    token ids   … a  b │ c  d │ e  <0xE6>  <0x97> …
                window ┘      └ held until the run ends and the text is whole
    text        decode(window + held) minus decode(window)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

HALF_A_CHARACTER = "\ufffd"


class Pieces(Protocol):
    """What the detokenizer asks of a tokenizer."""

    def decode(self, token_ids: list[int]) -> str: ...
    def is_shown(self, token_id: int) -> bool:
        """False for special tokens and for ids of no token."""

    def is_byte(self, token_id: int) -> bool:
        """Whether it is one raw byte, whose meaning its neighbours decide."""


class Detokenizer:
    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._window: list[int] = []
        self._window_text = ""
        self._held: list[int] = []

    def add(self, token_ids: Iterable[int]) -> str:
        """The text that is certain now and was not before."""
        return "".join([self._add(token_id) for token_id in token_ids])

    def _add(self, token_id: int) -> str:
        if not self._pieces.is_shown(token_id):
            return ""
        self._held.append(token_id)
        if self._pieces.is_byte(token_id):
            return ""
        text = self._pieces.decode(self._window + self._held)
        if text.endswith(HALF_A_CHARACTER):
            return ""
        new = text[len(self._window_text) :]
        self._window, self._held = self._held, []
        self._window_text = self._pieces.decode(self._window)
        return new

    def flush(self) -> str:
        """What was held back, broken characters and all; the last call."""
        text = self._pieces.decode(self._window + self._held) if self._held else self._window_text
        self._held = []
        return text[len(self._window_text) :]
