"""Whatever a worker does, the client gets its text or one clear error, and nothing is left behind."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from pdserve.errors import EngineFailure, PdserveError, WorkerLost
from pdserve.model_card import ModelCard
from tests.fakes.fake_worker import FOREVER, FakeWorker, says
from tests.support.fake_fleet import MODEL, Fleet, OpenStream, eventually, open_fleet, parse_events
from tests.support.tiny_tokenizers import byte_level, write_model_folder

OUTPUT = byte_level().encode("zyxwvutsrqponmlkjihgfedcba 9876543210").ids
REQUEST: dict[str, Any] = {"temperature": 0, "max_tokens": 20}
TEXT = byte_level().decode(OUTPUT[:20])
NO_WORKER_LIMIT_S = 2.0


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    return write_model_folder(tmp_path_factory.mktemp("model"), byte_level())


@pytest.fixture
def fleet(card: ModelCard) -> Iterator[Fleet]:
    """Two of each."""
    with open_fleet(card, says(OUTPUT), num_prefill=2, num_decode=2) as fleet:
        yield fleet
        fleet.assert_idle()


@pytest.fixture
def pair(card: ModelCard) -> Iterator[Fleet]:
    with open_fleet(card, says(OUTPUT)) as fleet:
        yield fleet
        fleet.assert_idle()


def text_of(events: list[str]) -> str:
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def busy(workers: list[FakeWorker]) -> FakeWorker:
    (worker,) = [worker for worker in workers if worker.num_live]
    return worker


@pytest.mark.parametrize("num_tokens", [2, 5, 19])
def test_a_stream_goes_on_with_the_next_token_when_its_decode_worker_dies(
    fleet: Fleet, num_tokens: int
) -> None:
    for worker in fleet.decode:
        worker.faults.pause_at = num_tokens
    stream = OpenStream(fleet, **REQUEST)
    stream.read_events(num_tokens)
    victim = busy(fleet.decode)
    for worker in fleet.decode:
        worker.faults.pause_at = FOREVER
    fleet.thread.run(victim.kill())
    *events, last = stream.rest()
    assert (text_of(events), last) == (TEXT, "[DONE]")
    resumed = [message.prefill.sequence for worker in fleet.prefill for message in worker.requests("prefill")]
    assert sorted(len(sequence.output_token_ids) for sequence in resumed) == [0, 4 * num_tokens]


FAULTS: dict[str, Callable[[Fleet], None]] = {
    "prefill refuses": lambda fleet: setattr(fleet.prefill[0].faults, "refuse", "too_many_requests"),
    "prefill fails before its token": lambda fleet: setattr(fleet.prefill[0].faults, "fail_at", 0),
    "the hand-off is aborted": lambda fleet: setattr(fleet.prefill[0].faults, "abort_handoff", "timeout"),
    "prefill is draining": lambda fleet: setattr(fleet.prefill[0], "draining", True),
    "prefill is gone": lambda fleet: fleet.thread.run(fleet.prefill[0].kill()),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("max_tokens", [1, 2, 20])
def test_decode_alone_takes_over_what_prefill_cannot_do(pair: Fleet, fault: str, max_tokens: int) -> None:
    FAULTS[fault](pair)
    response = pair.complete(**REQUEST | {"max_tokens": max_tokens})
    assert response.json()["choices"][0]["text"] == byte_level().decode(OUTPUT[:max_tokens])
    assert response.json()["usage"]["completion_tokens"] == max_tokens


def test_a_prefill_worker_that_dies_at_work_is_replaced(pair: Fleet) -> None:
    pair.prefill[0].faults.pause_at = 0
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(pair.complete, **REQUEST)
        eventually(lambda: pair.prefill[0].num_live == 1)
        pair.thread.run(pair.prefill[0].kill())
        assert answer.result(10.0).json()["choices"][0]["text"] == TEXT


def test_other_workers_are_tried_before_giving_up(fleet: Fleet) -> None:
    fleet.decode[0].faults.fail_at = 3
    fleet.prefill[0].faults.fail_at = 0
    for _ in range(4):
        assert fleet.complete(**REQUEST).json()["choices"][0]["text"] == TEXT


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (EngineFailure("CUDA error at 0x7f"), 500, "engine_failure"),
        (WorkerLost("10.0.0.7"), 502, "peer_error"),
    ],
)
def test_a_request_that_fails_everywhere_is_one_clear_error(
    fleet: Fleet, error: PdserveError, status: int, code: str
) -> None:
    for worker in fleet.workers:
        worker.faults.fail_at = 0
        worker.faults.fail_with = error
    response = fleet.complete(**REQUEST)
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert "0x7f" not in response.text
    assert "10.0.0.7" not in response.text


def test_an_error_in_the_middle_of_a_stream_is_an_event_and_no_good_end(fleet: Fleet) -> None:
    for worker in fleet.workers:
        worker.faults.fail_at = 5
        worker.faults.fail_with = EngineFailure("secret detail")
    response = fleet.complete(stream=True, **REQUEST)
    *events, last = parse_events(response.content)
    assert text_of(events) == byte_level().decode(OUTPUT[:5])
    assert not any(json.loads(event)["choices"][0]["finish_reason"] for event in events)
    assert json.loads(last)["error"]["code"] == "engine_failure"
    assert "secret detail" not in response.text


def test_openais_client_sees_an_error_in_the_middle_of_a_stream(fleet: Fleet) -> None:
    for worker in fleet.decode:
        worker.faults.fail_at = 5
    with openai.OpenAI(base_url=fleet.url + "/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(model=MODEL, prompt=[5, 6], stream=True, **REQUEST)
        with pytest.raises(openai.APIError):
            list(stream)


def test_a_failed_choice_ends_its_siblings(fleet: Fleet) -> None:
    for worker in fleet.workers:
        worker.faults.fail_at = 4
    assert fleet.complete(n=5, **REQUEST).status_code == 502


def test_without_decode_workers_the_answer_is_quick_and_honest(pair: Fleet) -> None:
    pair.thread.run(pair.decode[0].kill())
    begin_s = time.monotonic()
    response = pair.complete(**REQUEST)
    assert time.monotonic() - begin_s < NO_WORKER_LIMIT_S
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    assert response.json()["error"]["code"] == "overloaded"
    assert pair.decode[0].address not in response.text


def test_a_stream_without_any_decode_worker_left_ends_quickly_with_an_error(pair: Fleet) -> None:
    pair.decode[0].faults.pause_at = 5
    stream = OpenStream(pair, **REQUEST)
    stream.read_events(5)
    begin_s = time.monotonic()
    pair.thread.run(pair.decode[0].kill())
    events = stream.rest()
    assert time.monotonic() - begin_s < NO_WORKER_LIMIT_S
    assert json.loads(events[-1])["error"]["code"] == "overloaded"


def test_a_worker_that_comes_back_is_used_again(pair: Fleet) -> None:
    for worker in pair.workers:
        pair.thread.run(worker.kill())
    eventually(lambda: len(pair.service.problems()) == 2)
    assert httpx.get(pair.url + "/ready").status_code == 503
    for worker in pair.workers:
        pair.thread.run(worker.start())
    pair.wait_ready()
    assert httpx.get(pair.url + "/ready").json() == {"status": "ready", "problems": []}
    assert pair.complete(**REQUEST).json()["choices"][0]["text"] == TEXT


def test_a_stuck_engine_is_not_ready_and_loses_its_requests(fleet: Fleet) -> None:
    for worker in fleet.decode:
        worker.faults.pause_at = 5
    stream = OpenStream(fleet, **REQUEST)
    stream.read_events(5)
    victim = busy(fleet.decode)
    victim.last_step_age_s = 60.0
    for worker in fleet.decode:
        if worker is not victim:
            worker.faults.pause_at = FOREVER
    *events, last = stream.rest()
    assert (text_of(events), last) == (TEXT, "[DONE]")
    for worker in fleet.decode:
        worker.last_step_age_s = 60.0
    eventually(lambda: bool(fleet.service.problems()))


def test_a_worker_with_another_role_is_no_worker(card: ModelCard) -> None:
    """Addresses swapped by mistake are named in /ready."""
    with open_fleet(card, says(OUTPUT)) as fleet:
        swapped = [fleet.prefill[0].address]
        with open_fleet(card, says(OUTPUT), num_prefill=0, num_decode=0, decode_workers=swapped) as wrong:
            eventually(lambda: "WORKER_ROLE_PREFILL" in str(wrong.service.problems()))
