"""The API over real processes, split and aggregated: they cannot be told apart."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.model_folder import token_ids_of
from tests.support.processes import Processes, open_processes

pytestmark = pytest.mark.e2e

PROMPT = "t5 t60 t7 t101 t33 t9 t12 t150 t77 t4 t18"


@pytest.fixture(scope="module")
def aggregated(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with open_processes(model_folder, tmp_path_factory.mktemp("logs"), num_prefill=0) as running:
        yield running


REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 20},
    "one token": {"max_tokens": 1},
    "two tokens": {"max_tokens": 2},
    "three choices": {"max_tokens": 12, "n": 3, "temperature": 0.9, "seed": 7},
    "seeded": {"max_tokens": 20, "temperature": 1.1, "seed": 42, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "penalties": {"max_tokens": 20, "frequency_penalty": 1.0, "presence_penalty": 0.5},
    "repetition": {"max_tokens": 20, "repetition_penalty": 1.4},
    "bias": {"max_tokens": 8, "logit_bias": {"9": 100}},
    "minimum": {"max_tokens": 20, "min_tokens": 12},
    "logprobs": {"max_tokens": 6, "logprobs": 3},
    "two prompts": {"max_tokens": 6, "prompt": [PROMPT, "t9 t8 t7"], "n": 2},
    "echo": {"max_tokens": 5, "echo": True},
}


@pytest.mark.parametrize("name", sorted(REQUESTS))
def test_split_and_aggregated_answer_alike(processes: Processes, aggregated: Processes, name: str) -> None:
    fields = {"prompt": PROMPT, **REQUESTS[name]}
    split, whole = (system.complete(**fields).json() for system in (processes, aggregated))
    assert split["choices"] == whole["choices"]
    assert len({choice["index"] for choice in split["choices"]}) == len(split["choices"])
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert split["usage"][key] == whole["usage"][key]


def test_a_stop_string_across_the_seam_is_found(processes: Processes, aggregated: Processes) -> None:
    """Token 1 comes from prefill, token 2 from decode; the stop string spans both, or begins falsely."""
    tokens = processes.text(PROMPT, max_tokens=6).split()
    first, second, third = tokens[:3]
    cases = {
        f"{first} {second}": "",
        f"{second} {third}": f"{first} ",
        f"{first} t999": " ".join(tokens),
    }
    for stop, expected in cases.items():
        for system in (processes, aggregated):
            assert system.text(PROMPT, max_tokens=6, stop=stop) == expected, stop
    processes.assert_blocks_come_back()


def test_usage_and_finish_reason_are_true(processes: Processes) -> None:
    answer = processes.complete(PROMPT, max_tokens=5, ignore_eos=True).json()
    choice, usage = answer["choices"][0], answer["usage"]
    assert choice["finish_reason"] == "length"
    assert len(token_ids_of(choice["text"])) == usage["completion_tokens"] == 5
    assert usage["prompt_tokens"] == len(PROMPT.split())


def test_eos_as_the_first_token_is_an_empty_answer(processes: Processes) -> None:
    answer = processes.complete(PROMPT, max_tokens=5, logit_bias={"2": 100}).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 1
    processes.assert_blocks_come_back()


def test_a_cached_prefix_is_counted(processes: Processes) -> None:
    prompt = [100 + index for index in range(40)]
    answers = [processes.complete(prompt, max_tokens=4).json() for _ in range(2)]
    assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached == [0, 32]


def test_the_split_really_moves_kv(processes: Processes) -> None:
    """A server that silently prefilled on decode would pass every other test here."""
    before = processes.decode[0].status().counters["landed_bytes"]
    processes.text([50 + index * 3 % 160 for index in range(30)], max_tokens=3)
    assert processes.decode[0].status().counters["landed_bytes"] > before


def test_a_request_over_its_time_limit_is_ended_and_frees_both_workers(
    model_folder: Path, tmp_path: Path
) -> None:
    with open_processes(model_folder, tmp_path, router_flags=("--request-limit-s", "0.3")) as own:
        response = own.complete(PROMPT, max_tokens=4000, ignore_eos=True)
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "deadline_exceeded"
        own.assert_blocks_come_back()
