"""Client JSON is either a checked request or a refusal that names the field."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import ContextTooLong, ModelNotFound, RequestError
from pdserve.model_card import ModelCard
from pdserve_router.chat_template import ChatTemplate
from pdserve_router.parse import GenerationRequest, RequestParser
from pdserve_router.tokenizer import Tokenizer
from tests.support.tiny_tokenizers import byte_level, write_model_folder

CONTEXT = 64
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    return write_model_folder(tmp_path_factory.mktemp("model"), byte_level())


@pytest.fixture(scope="module")
def parser(card: ModelCard) -> RequestParser:
    return RequestParser(card, model_name="tiny", tokenizer=Tokenizer(card), chat_template=ChatTemplate(card))


def completion(parser: RequestParser, **fields: Any) -> GenerationRequest:
    body = {"model": "tiny", "prompt": [5, 6, 7]} | fields
    return parser.completion(json.dumps(body).encode(), CONTEXT)


def chat(parser: RequestParser, **fields: Any) -> GenerationRequest:
    return parser.chat(json.dumps({"model": "tiny", "messages": USER} | fields).encode(), CONTEXT)


# The vocabulary of the test model: ids below 349 are logits, 341 of them are tokens.
BAD_PROMPTS: list[Any] = [
    [0, 9999], [-1], [4294967295], [1 << 70], [True], [1.5], [], [[]], [[1], []], "", [""], ["a", ""],
    ["a", 5], [5, "a"], ["a", [5]], None, 7, {"a": 1}, [None], [[[1]]], "\ud800",
]  # fmt: skip
BAD_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    *[({"prompt": prompt}, "prompt") for prompt in BAD_PROMPTS],
    *[
        ({"logit_bias": bias}, "logit_bias")
        for bias in ({"9999": 1}, {"-1": 1}, {"x": 1}, {"5": 1e9}, {"5": "a"}, {"00000000000001": 1})
    ],
    *[({"temperature": value}, "temperature") for value in (-0.1, 101, "hot", True)],
    *[({"top_p": value}, "top_p") for value in (0, -1, 1.1)],
    *[({"max_tokens": value}, "max_tokens") for value in (0, -1, 1.5, "7", True)],
    *[({"n": value}, "n") for value in (0, -1, 129, 100_000, True)],
    *[({"stop": value}, "stop") for value in ("", ["a", ""], ["a"] * 5, [1], "x" * 1001, ["a"] * 500_000)],
    *[({"logprobs": value}, "logprobs") for value in (21, -1, 100_000, True)],
    *[({"seed": value}, "seed") for value in (1.5, "x", 1 << 63)],
    *[({"stop_token_ids": value}, "stop_token_ids") for value in ([9999], [-1], [True], list(range(65)))],
    ({"prompt": ["a"] * 257}, "n"),
    ({"prompt": ["a"] * 100, "n": 3}, "n"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"echo": True, "logprobs": 1}, "echo"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options"),
    ({"min_tokens": 17}, "min_tokens"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"min_p": 1.5}, "min_p"),
    ({"top_k": -2}, "top_k"),
    ({"guided_json": {"type": "object"}}, "guided_json"),
    ({"stream": "yes"}, "stream"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), BAD_COMPLETIONS, ids=lambda value: str(value)[:40])
def test_a_wrong_completion_is_refused_by_the_name_of_its_field(
    parser: RequestParser, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestError) as caught:
        completion(parser, **fields)
    assert caught.value.param == param
    assert len(str(caught.value)) < 500


BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"content": "hi"}]}, "messages"),
    ({"messages": [{"role": "robot", "content": "hi"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": []}, "functions"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_CHATS, ids=lambda value: str(value)[:40])
def test_a_wrong_chat_is_refused_by_the_name_of_its_field(
    parser: RequestParser, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestError) as caught:
        chat(parser, **fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000,
        b'{"model": "tiny", "prompt": "a", "temperature": NaN}',
        b'{"model": "tiny", "prompt": "a", "temperature": 1e999}',
        b'{"model": "tiny", "prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda body: str(body[-20:]),
)  # fmt: skip
def test_a_body_that_is_no_finite_json_object_is_refused(parser: RequestParser, body: bytes) -> None:
    with pytest.raises(RequestError):
        parser.completion(body, CONTEXT)


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
KEYS = st.sampled_from(["prompt", "n", "stop", "logit_bias", "messages", "role", "content", "5"])
JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3)
)


@given(value=JSON)
def test_whatever_json_comes_it_is_a_request_or_a_refusal(parser: RequestParser, value: Any) -> None:
    fields = value if isinstance(value, dict) else {"prompt": value, "messages": value}
    body = json.dumps(fields | {"model": "tiny"}).encode()
    for parse in (parser.completion, parser.chat):
        with suppress(RequestError):
            assert all(prompt.token_ids for prompt in parse(body, CONTEXT).prompts)


def test_a_prompt_longer_than_the_context_is_told_both_lengths(parser: RequestParser) -> None:
    with pytest.raises(ContextTooLong, match=r"64 tokens, the context 64") as caught:
        completion(parser, prompt=[5] * CONTEXT)
    assert caught.value.param == "prompt"


def test_the_longest_prompt_that_fits_leaves_room_for_one_token(parser: RequestParser) -> None:
    assert completion(parser, prompt=[5] * (CONTEXT - 1), max_tokens=9).sampling.max_tokens == 1


def test_ids_up_to_the_logits_width_are_legal(parser: RequestParser, card: ModelCard) -> None:
    assert completion(parser, prompt=[card.vocab_size - 1]).prompts[0].token_ids == [card.vocab_size - 1]


@pytest.mark.parametrize("name", ["nope", ""])
def test_another_model_is_not_found(parser: RequestParser, name: str) -> None:
    with pytest.raises(ModelNotFound):
        completion(parser, model=name)


def test_a_missing_model_is_refused(parser: RequestParser) -> None:
    with pytest.raises(RequestError) as caught:
        parser.completion(b'{"prompt": "a"}', CONTEXT)
    assert caught.value.param == "model"


def test_defaults_are_those_of_openai(parser: RequestParser) -> None:
    sampling = completion(parser).sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (16, 1.0, 1.0)
    assert sampling.num_logprobs is None


def test_a_chat_may_use_the_rest_of_the_context(parser: RequestParser) -> None:
    parsed = chat(parser)
    assert parsed.sampling.max_tokens == CONTEXT - len(parsed.prompts[0].token_ids)


@pytest.mark.parametrize(
    ("fields", "num_logprobs"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 5}, 5),
    ],
)
def test_logprobs_of_a_chat(parser: RequestParser, fields: dict[str, Any], num_logprobs: int | None) -> None:
    assert chat(parser, **fields).sampling.num_logprobs == num_logprobs


def test_the_newer_limit_wins(parser: RequestParser) -> None:
    assert chat(parser, max_tokens=9, max_completion_tokens=5, min_tokens=5).sampling.max_tokens == 5


def test_content_parts_read_like_one_text(parser: RequestParser) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert chat(parser, messages=[{"role": "user", "content": parts}]).prompts == chat(parser).prompts


@pytest.mark.parametrize(
    "fields", [{"tool_choice": "none", "tools": [1]}, {"tools": []}, {"store": True}, {"made_up": 1}]
)
def test_fields_without_effect_are_accepted(parser: RequestParser, fields: dict[str, Any]) -> None:
    assert chat(parser, **fields).prompts == chat(parser).prompts


def test_a_seed_is_always_set_and_a_given_one_is_kept(parser: RequestParser) -> None:
    assert completion(parser, seed=7).sampling.seed == 7
    assert completion(parser, seed=-1).sampling.seed == (1 << 64) - 1
    assert completion(parser).sampling.seed != completion(parser).sampling.seed


def test_echo_of_ids_is_their_text(parser: RequestParser) -> None:
    ids = completion(parser, prompt="the dog").prompts[0].token_ids
    assert completion(parser, prompt=ids, echo=True).prompts[0].echo_text == "the dog"


def test_bias_of_many_forms_is_keyed_by_number(parser: RequestParser) -> None:
    assert completion(parser, logit_bias={"5": -100, "6": 2.5}).sampling.logit_bias == {5: -100.0, 6: 2.5}
