"""From tokens to pieces: stop tokens, stop strings, logprobs and echo of one choice."""

from __future__ import annotations

import math

import pytest

from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve_router.choice_text import ChoiceText
from pdserve_router.merge import Tokens
from pdserve_router.openai_response import Piece, join_pieces
from pdserve_router.tokenizer import Tokenizer
from tests.support.tiny_tokenizers import END, byte_level, id_of, write_model_folder

END_ID = id_of(byte_level(), END)
EMOJI = "🎉🎋"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_model_folder(tmp_path_factory.mktemp("model"), byte_level()))


def choice_text(tokenizer: Tokenizer, *, prefix: str = "", stops: tuple[str, ...] = ()) -> ChoiceText:
    return ChoiceText(3, tokenizer, prefix=prefix, stops=stops, stop_token_ids={END_ID}, wants_logprobs=True)


def entry(logprob: float = -1.0, top: tuple[int, ...] = ()) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(logprob=logprob, top_token_ids=top, top_logprobs=[-2.0] * len(top))


def run(text: ChoiceText, token_ids: list[int], last_reason: str) -> Piece:
    pieces = []
    for place, token_id in enumerate(token_ids):
        reason = last_reason if place == len(token_ids) - 1 else ""
        pieces.append(text.add(Tokens((token_id,), (entry(),), reason)))
        if pieces[-1] is not None and pieces[-1].finish_reason:
            break
    return join_pieces([piece for piece in pieces if piece is not None])


def test_there_is_one_entry_per_token_and_their_bytes_are_the_text(tokenizer: Tokenizer) -> None:
    token_ids = [*tokenizer.encode(EMOJI + " the", add_special_tokens=False), END_ID]
    whole = run(choice_text(tokenizer), token_ids, "stop")
    assert whole.text == EMOJI + " the"
    assert whole.logprobs is not None
    assert len(whole.logprobs) == len(token_ids)
    assert b"".join(token.chosen.token_bytes for token in whole.logprobs).decode() == whole.text
    assert whole.logprobs[-1].chosen.text == END


def test_offsets_point_into_the_text_with_its_echo(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("one dog", add_special_tokens=False)
    whole = run(choice_text(tokenizer, prefix="héy "), token_ids, "length")
    assert whole.logprobs is not None
    for token in whole.logprobs:
        chosen = token.chosen.text
        assert whole.text[token.text_offset : token.text_offset + len(chosen)] == chosen


def test_echo_comes_with_the_first_token_and_not_before(tokenizer: Tokenizer) -> None:
    text = choice_text(tokenizer, prefix="prompt ")
    (first,) = tokenizer.encode("a", add_special_tokens=False)
    piece = text.add(Tokens((first,), (entry(),)))
    assert piece is not None
    assert piece.text == "prompt a"


def test_a_stop_string_across_tokens_is_not_shown_and_ends_the_choice(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("one DEFGHIJ two", add_special_tokens=False)
    whole = run(choice_text(tokenizer, stops=("DEFGHIJ",)), token_ids, "length")
    assert (whole.text, whole.finish_reason) == ("one ", "stop")


def test_a_stop_string_in_held_back_bytes_counts_at_the_end(tokenizer: Tokenizer) -> None:
    """The text's last character is broken, and the stop string is what is shown for it."""
    token_ids = [id_of(byte_level(), "ð")]
    whole = run(choice_text(tokenizer, stops=("\ufffd",)), token_ids, "length")
    assert (whole.text, whole.finish_reason) == ("", "stop")


def test_a_false_start_is_shown_when_the_budget_ends(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("one DEF", add_special_tokens=False)
    whole = run(choice_text(tokenizer, stops=("DEFGHIJ",)), token_ids, "length")
    assert (whole.text, whole.finish_reason) == ("one DEF", "length")


def test_never_is_a_number_in_json(tokenizer: Tokenizer) -> None:
    piece = choice_text(tokenizer).add(Tokens((70,), (entry(-math.inf, top=(71,)),), "length"))
    assert piece is not None
    assert piece.logprobs is not None
    assert piece.logprobs[0].chosen.logprob == -9999.0


def test_alternatives_that_are_pieces_of_characters_stay_apart(tokenizer: Tokenizer) -> None:
    halves = [id_of(byte_level(), piece) for piece in "İĭ"]
    piece = choice_text(tokenizer).add(Tokens((70,), (entry(top=tuple(halves)),), "length"))
    assert piece is not None
    assert piece.logprobs is not None
    assert len({other.text for other in piece.logprobs[0].top}) == len(halves)
