"""Pieces of text joined equal the whole decoded at once, and no piece has half a character."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer

from pdserve_router.detokenizer import HALF_A_CHARACTER, Detokenizer
from pdserve_router.tokenizer import Tokenizer
from tests.support.tiny_tokenizers import byte_level, id_of, sentencepiece, write_model_folder

KINDS: dict[str, Callable[[], FastTokenizer]] = {"byte_level": byte_level, "sentencepiece": sentencepiece}
TEXTS = ["the dog", " the", "naïve 日本語", "a🎉b", "🎉🎉", "e\u0301!", "日", "  two  spaces "]


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp(request.param)
    return Tokenizer(write_model_folder(folder, KINDS[request.param]()))


def pieces_of(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.add([token_id]) for token_id in token_ids), detokenizer.flush()]


@given(data=st.data())
def test_joined_pieces_equal_the_whole(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Any ids: broken characters, special tokens, ids beyond the tokenizer's last."""
    token_ids = data.draw(st.lists(st.integers(0, 350), max_size=12))
    assert "".join(pieces_of(tokenizer, token_ids)) == tokenizer.decode(token_ids)


@pytest.mark.parametrize("text", TEXTS)
def test_only_the_last_piece_of_valid_text_may_end_late(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    for cut in range(len(token_ids) + 1):
        pieces = pieces_of(tokenizer, token_ids[:cut])
        assert not any(HALF_A_CHARACTER in piece for piece in pieces[:-1])
        assert "".join(pieces) == tokenizer.decode(token_ids[:cut])


def test_whole_characters_are_shown_with_the_token_that_completes_them() -> None:
    """Nothing is held back that later tokens cannot change."""
    fast = byte_level()

    class Pieces:
        def decode(self, token_ids: list[int]) -> str:
            return str(fast.decode(token_ids))

        def is_shown(self, token_id: int) -> bool:
            return True

        def is_byte(self, token_id: int) -> bool:
            return False

    detokenizer = Detokenizer(Pieces())
    token_ids = [id_of(fast, piece) for piece in "aðŁİĭb"]  # an emoji in four bytes between letters
    assert [detokenizer.add([token_id]) for token_id in token_ids] == ["a", "", "", "", "\U0001f38b", "b"]


def test_tokens_that_arrive_together_read_like_tokens_that_arrive_alone(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("a 🎉 the 日本", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer)
    together = detokenizer.add(token_ids) + detokenizer.flush()
    assert together == "".join(pieces_of(tokenizer, token_ids))


@given(data=st.data())
def test_token_bytes_join_to_the_bytes_of_the_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """But for the space that SentencePiece drops at the very beginning."""
    text = data.draw(st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=8))
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    joined = b"".join(tokenizer.token_bytes(token_id) for token_id in token_ids)
    assert joined.decode().removeprefix(" ") == tokenizer.decode(token_ids).removeprefix(" ")


def test_a_special_token_adds_no_bytes(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(1) == b""
