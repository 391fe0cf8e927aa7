"""Text to token ids and back, with the model's own tokenizer file."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tokenizers import Tokenizer as FastTokenizer

from pdserve.model_card import ModelCard

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
_WORD_START = "▁"  # a space, in SentencePiece's alphabet


class Tokenizer:
    def __init__(self, card: ModelCard) -> None:
        self._fast = FastTokenizer.from_file(str(card.tokenizer_path))
        self._fast.no_truncation()
        self._fast.no_padding()
        added = self._fast.get_added_tokens_decoder()
        self._special = {token_id for token_id, token in added.items() if token.special}
        self._literal = {token_id: token.content for token_id, token in added.items()}
        self._bytes = _byte_of_character() if "ByteLevel" in str(self._fast.decoder) else {}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """A chat template writes its special tokens itself; a plain prompt gets the model's."""
        return list(self._fast.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._fast.decode(list(token_ids), skip_special_tokens=True))

    def is_shown(self, token_id: int) -> bool:
        return token_id not in self._special and self._fast.id_to_token(token_id) is not None

    def is_byte(self, token_id: int) -> bool:
        """A byte-level tokenizer has none: there a broken character shows in the decoded text."""
        return not self._bytes and _BYTE_PIECE.fullmatch(self._fast.id_to_token(token_id) or "") is not None

    def token_text(self, token_id: int) -> str | None:
        """Of a token whose name is its text, as special tokens are; None for the others."""
        return self._literal.get(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text: a piece of a character as its bytes, a special token nothing."""
        if not self.is_shown(token_id):
            return b""
        if literal := self._literal.get(token_id):
            return literal.encode()
        piece = self._fast.id_to_token(token_id) or ""
        if self._bytes and all(character in self._bytes for character in piece):
            return bytes(self._bytes[character] for character in piece)
        if match := _BYTE_PIECE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return piece.replace(_WORD_START, " ").encode()


def _byte_of_character() -> dict[str, int]:
    """GPT-2's mapping: printable bytes are themselves, the others follow from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }
