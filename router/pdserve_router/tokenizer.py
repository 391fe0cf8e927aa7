"""Text to token ids and back, with the model's own tokenizer file."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer as FastTokenizer

from pdserve.model_card import ModelCard


class Tokenizer:
    def __init__(self, card: ModelCard) -> None:
        self._fast = FastTokenizer.from_file(str(card.tokenizer_path))
        self._fast.no_truncation()
        self._fast.no_padding()

    @property
    def fast(self) -> FastTokenizer:
        return self._fast

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """A chat template writes its special tokens itself; a plain prompt gets the model's."""
        return list(self._fast.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._fast.decode(list(token_ids), skip_special_tokens=True))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; a piece of a character comes out as its bytes, not as U+FFFD."""
        piece = self._fast.id_to_token(token_id)
        if piece is None:
            return b""
        text = self._fast.decode([token_id], skip_special_tokens=False)
        if "\ufffd" not in text:
            return text.encode()
        return _piece_bytes(piece)


def _piece_bytes(piece: str) -> bytes:
    """Byte-level BPE writes bytes as printable characters, SentencePiece as ``<0xNN>``."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    table = _byte_of_character()
    return bytes(table[character] for character in piece if character in table)


def _byte_of_character() -> dict[str, int]:
    """GPT-2's mapping: printable bytes are themselves, the others follow from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }
