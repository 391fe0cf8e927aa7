"""What clients get from the router over HTTP: shapes, texts, usage, the end of a stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from pdserve.model_card import ModelCard
from pdserve.sampling import SamplingParams, choice_seed
from tests.support.fake_fleet import MODEL, Fleet, eventually, open_fleet
from tests.support.tiny_tokenizers import END, byte_level, id_of, write_model_folder

TEXT = "the quick 🎉 日本語 dog"
END_ID = id_of(byte_level(), END)
OUTPUT = [*byte_level().encode(TEXT).ids, END_ID]


def say(prompt: list[int], index: int, sampling: SamplingParams) -> int:
    """A sampled sequence says its seed, a prompt of one token repeats it, others say TEXT."""
    if sampling.temperature > 0:
        return 10 + (sampling.seed >> (5 * index)) % 32
    return prompt[0] if len(prompt) == 1 else OUTPUT[index % len(OUTPUT)]


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    return write_model_folder(tmp_path_factory.mktemp("model"), byte_level())


@pytest.fixture(scope="module", params=[1, 0], ids=["disaggregated", "aggregated"])
def shared_fleet(request: pytest.FixtureRequest, card: ModelCard) -> Iterator[Fleet]:
    with open_fleet(card, say, num_prefill=request.param) as fleet:
        yield fleet


@pytest.fixture
def fleet(shared_fleet: Fleet) -> Iterator[Fleet]:
    yield shared_fleet
    shared_fleet.assert_idle()


@pytest.fixture
def client(fleet: Fleet) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=fleet.url + "/v1", api_key="none", max_retries=0, timeout=10.0) as client:
        yield client


GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 64}


def test_a_completion_has_the_text_its_reason_and_its_usage(fleet: Fleet) -> None:
    body = fleet.complete(**GREEDY).json()
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": len(OUTPUT),
        "total_tokens": 3 + len(OUTPUT),
        "prompt_tokens_details": {"cached_tokens": 2},
    }


@pytest.mark.parametrize("max_tokens", range(1, len(OUTPUT) + 1))
def test_joined_chunks_equal_the_whole_wherever_the_budget_cuts(fleet: Fleet, max_tokens: int) -> None:
    request: dict[str, Any] = {"prompt": "hi there", "temperature": 0, "max_tokens": max_tokens}
    whole = fleet.complete(**request).json()["choices"][0]
    chunks = [event["choices"][0] for event in fleet.stream("/v1/completions", request)]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    assert [chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"]] == [whole["finish_reason"]]
    assert chunks[-1]["finish_reason"] == ("stop" if max_tokens == len(OUTPUT) else "length")


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("is_stream", [False, True])
def test_one_token_is_one_token_and_prefill_answers_alone(fleet: Fleet, n: int, is_stream: bool) -> None:
    for worker in fleet.workers:
        worker.handled.clear()
    request: dict[str, Any] = {"prompt": [5, 6], "temperature": 0, "max_tokens": 1, "n": n}
    if is_stream:
        options = {"stream_options": {"include_usage": True}}
        events = fleet.stream("/v1/completions", request | options)
        usage = events[-1]["usage"]
    else:
        usage = fleet.complete(**request).json()["usage"]
    assert usage["completion_tokens"] == n
    if fleet.prefill:
        # An earlier request's release may still arrive.
        assert not fleet.decode[0].requests("reserve")
        assert not fleet.decode[0].requests("generate")


def test_choices_are_ordered_by_prompt_then_sample(fleet: Fleet) -> None:
    prompts = [[40 + place] for place in range(33)]
    body = fleet.complete(prompt=prompts, n=2, temperature=0, max_tokens=3).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(66))
    for choice in body["choices"]:
        expected = byte_level().decode([40 + choice["index"] // 2] * 3)
        assert choice["text"] == expected
    assert body["usage"]["prompt_tokens"] == 33
    assert body["usage"]["completion_tokens"] == 66 * 3


def test_samples_have_seeds_of_their_own_and_the_same_ones_each_time(fleet: Fleet) -> None:
    request: dict[str, Any] = {"n": 3, "seed": 12345678901, "temperature": 0.8, "max_tokens": 6}
    first, again = fleet.complete(**request).json(), fleet.complete(**request).json()
    texts = [choice["text"] for choice in first["choices"]]
    assert texts == [choice["text"] for choice in again["choices"]]
    seeds = [choice_seed(12345678901, sample) for sample in range(3)]
    assert texts == [byte_level().decode([10 + (seed >> (5 * i)) % 32 for i in range(6)]) for seed in seeds]


def test_without_a_seed_two_calls_differ(fleet: Fleet) -> None:
    texts = {fleet.complete(temperature=1, max_tokens=12).json()["choices"][0]["text"] for _ in range(2)}
    assert len(texts) == 2


def test_echo_puts_the_prompt_before_the_text(fleet: Fleet) -> None:
    request: dict[str, Any] = {"prompt": "hi there", "echo": True} | GREEDY
    assert fleet.complete(**request).json()["choices"][0]["text"] == "hi there" + TEXT
    chunks = fleet.stream("/v1/completions", request)
    assert "".join(event["choices"][0]["text"] for event in chunks) == "hi there" + TEXT


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("quick", "the "),
        (["dog", "日本"], "the quick 🎉 "),
        ("🎉", "the quick "),
        ("the", ""),
        ("dogs", TEXT),
        (["quick 🎉", "quick"], "the "),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_stop_string_ends_the_text_before_it(
    fleet: Fleet, stop: str | list[str], text: str, is_stream: bool
) -> None:
    request: dict[str, Any] = {"prompt": [5, 6], "stop": stop} | GREEDY
    if is_stream:
        choices = [event["choices"][0] for event in fleet.stream("/v1/completions", request)]
    else:
        choices = fleet.complete(**request).json()["choices"]
    assert "".join(choice["text"] for choice in choices) == text
    assert choices[-1]["finish_reason"] == "stop"


def test_a_stop_token_ends_the_text_unseen(fleet: Fleet) -> None:
    body = fleet.complete(stop_token_ids=[OUTPUT[3]], **GREEDY).json()
    assert body["choices"][0]["text"] == byte_level().decode(OUTPUT[:3])
    assert body["usage"]["completion_tokens"] == 4


def test_logprobs_have_one_entry_per_token(fleet: Fleet) -> None:
    body = fleet.complete(logprobs=2, **GREEDY).json()
    logprobs = body["choices"][0]["logprobs"]
    assert {len(values) for values in logprobs.values()} == {len(OUTPUT)}
    assert all(3 >= len(top) >= 2 for top in logprobs["top_logprobs"])


def test_chat_logprobs_join_to_the_bytes_of_the_text(client: openai.OpenAI) -> None:
    for is_stream in (False, True):
        content = list(_chat_logprobs(client, is_stream=is_stream))
        assert len(content) == len(OUTPUT)
        assert b"".join(bytes(entry.bytes or []) for entry in content).decode() == TEXT
        assert all(len(entry.top_logprobs) == 5 for entry in content)


def _chat_logprobs(client: openai.OpenAI, *, is_stream: bool) -> Iterator[Any]:
    messages: Any = [{"role": "user", "content": "hi"}]
    arguments: dict[str, Any] = {"logprobs": True, "top_logprobs": 5, "temperature": 0}
    if not is_stream:
        answer = client.chat.completions.create(model=MODEL, messages=messages, **arguments)
        assert answer.choices[0].logprobs is not None
        yield from answer.choices[0].logprobs.content or []
        return
    for chunk in client.chat.completions.create(model=MODEL, messages=messages, stream=True, **arguments):
        if chunk.choices[0].logprobs is not None:
            yield from chunk.choices[0].logprobs.content or []


def test_a_chat_stream_has_roles_first_one_finish_per_choice_and_usage_last(fleet: Fleet) -> None:
    request = {
        "messages": [{"role": "user", "content": "hi"}],
        "n": 3,
        "stream_options": {"include_usage": True},
    } | GREEDY
    events = fleet.stream("/v1/chat/completions", request)
    roles = [event["choices"][0] for event in events[:3]]
    assert [(choice["index"], choice["delta"]["role"]) for choice in roles] == [
        (index, "assistant") for index in range(3)
    ]
    *chunks, usage = events[3:]
    for index in range(3):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(choice["delta"].get("content", "") for choice in own) == TEXT
        assert [choice["finish_reason"] for choice in own if choice["finish_reason"]] == ["stop"]
        assert own[-1]["finish_reason"] == "stop"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 3 * len(OUTPUT)
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1


@pytest.mark.parametrize("options", [{}, {"stream_options": {}}, {"stream_options": None}])
def test_usage_is_sent_only_when_asked_for(fleet: Fleet, options: dict[str, Any]) -> None:
    events = fleet.stream("/v1/completions", {"prompt": [5, 6]} | GREEDY | options)
    assert not any(event.get("usage") for event in events)
    assert all(event["choices"] for event in events)


def test_timing_is_sent_only_when_asked_for(fleet: Fleet) -> None:
    assert "pdserve" not in fleet.complete(**GREEDY).json()
    timing = fleet.complete(timing=True, **GREEDY).json()["pdserve"]
    assert len(timing["token_times_ms"]) == len(OUTPUT)
    assert timing["ttft_ms"] == timing["token_times_ms"][0]
    # The hand-off's report is on another connection than the last token, which does not wait for it.
    expected = "fake" if fleet.prefill else None
    eventually(lambda: fleet.complete(timing=True, **GREEDY).json()["pdserve"].get("transport") == expected)


def test_openais_client_reads_whole_answers_and_streams(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, temperature=0)
    assert (answer.choices[0].message.content, answer.model) == (TEXT, MODEL)
    stream = client.completions.create(model=MODEL, prompt="hi there", stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in stream) == TEXT


def test_decode_gets_the_clients_own_limits_and_prefill_makes_one_token(fleet: Fleet) -> None:
    for worker in fleet.workers:
        worker.handled.clear()
    before = [worker.num_generated for worker in fleet.prefill]
    messages = [{"role": "user", "content": "hi"}]
    body = {"messages": messages, "max_completion_tokens": 9, "min_tokens": 5, "temperature": 0}
    assert fleet.post("/v1/chat/completions", body).status_code == 200
    assert [worker.num_generated - count for worker, count in zip(fleet.prefill, before, strict=True)] == [
        1
    ] * len(fleet.prefill)
    (message,) = fleet.decode[0].requests("reserve" if fleet.prefill else "generate")
    sequence = message.reserve.sequence if fleet.prefill else message.generate.sequence
    assert (sequence.sampling.max_tokens, sequence.sampling.min_tokens) == (9, 5)
