"""Clients that leave, read slowly or come when there is no room; and gauges that tell the truth."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from pdserve.errors import Overloaded
from pdserve.model_card import ModelCard
from pdserve_router import answer, sse
from tests.fakes.fake_worker import FakeWorker, says
from tests.support.fake_fleet import MODEL, Fleet, OpenStream, eventually, open_fleet
from tests.support.tiny_tokenizers import byte_level, write_model_folder

OUTPUT = byte_level().encode("zyxwvutsrqponmlkjihgfedcba 9876543210").ids
LONG: dict[str, Any] = {"temperature": 0, "max_tokens": 200, "ignore_eos": True}
SHORT: dict[str, Any] = {"temperature": 0, "max_tokens": 4}
STOP_LIMIT_S = 1.0


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    return write_model_folder(tmp_path_factory.mktemp("model"), byte_level())


@pytest.fixture
def fleet(card: ModelCard) -> Iterator[Fleet]:
    with open_fleet(card, says(OUTPUT)) as fleet:
        yield fleet
        fleet.assert_idle()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


@contextmanager
def open_request(fleet: Fleet, *, is_stream: bool, **fields: Any) -> Iterator[None]:
    """A client that has asked, reads nothing, and can be gone the next moment."""
    request = {"model": MODEL, "prompt": [5, 6, 7], "stream": is_stream} | LONG | fields
    body = json.dumps(request).encode()
    host, port = fleet.url.removeprefix("http://").split(":")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        yield


def outcomes(fleet: Fleet) -> dict[str, float]:
    return samples(fleet, "pdserve_requests_total")


def samples(fleet: Fleet, name: str) -> dict[str, float]:
    """By the labels."""
    lines = httpx.get(fleet.url + "/metrics").text.splitlines()
    values = [line.removeprefix(name).rsplit(" ", 1) for line in lines if line.startswith(name)]
    return {labels: float(value) for labels, value in values}


def await_waiting(fleet: Fleet, count: int) -> None:
    eventually(lambda: samples(fleet, "pdserve_requests_waiting") == {"": count})


def hold(fleet: Fleet, phase: str) -> FakeWorker:
    """Makes requests stop in a phase; the worker on which they can be seen."""
    if phase == "prefill":
        fleet.prefill[0].faults.pause_at = 0
        return fleet.prefill[0]
    fleet.decode[0].faults.pause_at = 3
    return fleet.decode[0]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_client_that_leaves_stops_the_work_at_once(fleet: Fleet, phase: str, is_stream: bool) -> None:
    worker = hold(fleet, phase)
    with open_request(fleet, is_stream=is_stream):
        eventually(lambda: worker.num_live == 1)
    for worker in fleet.workers:
        worker.assert_idle(STOP_LIMIT_S)
    eventually(lambda: outcomes(fleet).get('{outcome="disconnected"}') == 1)


def test_a_client_that_leaves_while_others_hold_all_room_is_forgotten(fleet: Fleet) -> None:
    fleet.decode[0].faults.max_requests = 0
    with open_request(fleet, is_stream=True):
        await_waiting(fleet, 1)
    await_waiting(fleet, 0)


def test_one_choice_of_many_that_is_cancelled_takes_all_with_it(fleet: Fleet) -> None:
    worker = hold(fleet, "decode")
    stream = OpenStream(fleet, n=4, **LONG)
    eventually(lambda: worker.num_live == 4)
    stream.close()
    worker.assert_idle(STOP_LIMIT_S)


def test_requests_wait_for_room_and_are_served_in_order(fleet: Fleet, threads: ThreadPoolExecutor) -> None:
    fleet.decode[0].faults.max_requests = 1
    fleet.decode[0].faults.pause_at = 3
    answers = [threads.submit(fleet.complete, **SHORT | {"prompt": [40]})]
    eventually(lambda: fleet.decode[0].num_live == 1)
    for place in range(1, 5):
        answers.append(threads.submit(fleet.complete, **SHORT | {"prompt": [40 + place]}))
        await_waiting(fleet, place)
    fleet.call(fleet.decode[0].resume)
    assert all_ok(answers)
    served = [
        message.prefill.sequence.prompt_token_ids[0] for message in fleet.prefill[0].requests("prefill")
    ]
    assert served == [40, 41, 42, 43, 44]


def all_ok(answers: list[Future[httpx.Response]]) -> bool:
    return [future.result(10.0).status_code for future in answers] == [200] * len(answers)


def test_room_that_is_given_back_is_used_at_once(fleet: Fleet, threads: ThreadPoolExecutor) -> None:
    """Nobody waits for the next report of a worker."""
    fleet.decode[0].faults.max_requests = 1
    fleet.decode[0].faults.pause_at = 3
    with open_request(fleet, is_stream=True):
        eventually(lambda: fleet.decode[0].num_live == 1)
        waiting = threads.submit(fleet.complete, **SHORT)
        await_waiting(fleet, 1)
        fleet.decode[0].faults.pause_at = 1000
    assert waiting.result(5.0).status_code == 200


def test_a_decode_worker_that_is_full_does_not_hide_one_with_room(card: ModelCard) -> None:
    with open_fleet(card, says(OUTPUT), num_decode=2) as fleet:
        first = min(fleet.decode, key=lambda worker: worker.address)
        first.faults.max_requests = 0
        assert fleet.complete(**SHORT).status_code == 200
        fleet.assert_idle()


@pytest.mark.parametrize("num_prefill", [0, 1])
def test_a_full_line_and_a_long_wait_are_refused_with_when_to_come_back(
    card: ModelCard, threads: ThreadPoolExecutor, num_prefill: int
) -> None:
    with open_fleet(card, says(OUTPUT), num_prefill=num_prefill, max_queue=2, queue_limit_s=0.6) as fleet:
        fleet.decode[0].faults.max_requests = 0
        waiting = [threads.submit(fleet.complete, **SHORT) for _ in range(2)]
        await_waiting(fleet, 2)
        refused = fleet.complete(**SHORT)
        for response in (refused, *[future.result(10.0) for future in waiting]):
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "overloaded"
            assert int(response.headers["retry-after"]) >= 1
        fleet.decode[0].faults.max_requests = 100
        assert fleet.complete(**SHORT).status_code == 200
        fleet.assert_idle()


def test_a_request_over_its_limit_ends_with_a_deadline(card: ModelCard) -> None:
    with open_fleet(card, says(OUTPUT), request_limit_s=0.3) as fleet:
        hold(fleet, "prefill")
        response = fleet.complete(**SHORT)
        assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
        fleet.assert_idle()


def test_a_client_that_does_not_read_is_bounded_and_then_cut(
    card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer, "MAX_PIECES_WAITING", 4)
    monkeypatch.setattr(sse, "STALLED_CLIENT_LIMIT_S", 0.5)
    with open_fleet(card, says(OUTPUT)) as fleet, open_request(fleet, is_stream=True, n=16):
        eventually(lambda: fleet.decode[0].num_live > 0)
        assert fleet.complete(**SHORT).status_code == 200
        eventually(lambda: outcomes(fleet) == {'{outcome="ok"}': 1, '{outcome="disconnected"}': 1})
        fleet.assert_idle()


def test_two_requests_with_one_client_id_do_not_meet(fleet: Fleet, threads: ThreadPoolExecutor) -> None:
    hold(fleet, "decode")
    headers = {"x-request-id": "same"}
    answers = [
        threads.submit(fleet.complete, **SHORT | {"prompt": [50 + place] * 2}, headers=headers)
        for place in range(2)
    ]
    eventually(lambda: fleet.decode[0].num_live == 2)
    fleet.call(fleet.decode[0].resume)
    assert all_ok(answers)
    ids = {message.reserve.request_id for message in fleet.decode[0].requests("reserve")}
    assert len(ids) == 2
    assert not any("same" in request_id for request_id in ids)


def test_after_a_mass_cancel_gauges_are_zero_and_traffic_reaches_both_workers(card: ModelCard) -> None:
    with open_fleet(card, says(OUTPUT), num_decode=2) as fleet:
        for worker in fleet.decode:
            worker.faults.pause_at = 3
        streams = [OpenStream(fleet, n=20, **LONG) for _ in range(2)]
        eventually(lambda: sum(worker.num_live for worker in fleet.decode) == 40)
        assert [worker.num_live for worker in fleet.decode] == [20, 20]
        for stream in streams:
            stream.close()
        fleet.assert_idle()
        assert samples(fleet, "pdserve_requests_running") == {"": 0}
        eventually(lambda: set(samples(fleet, "pdserve_worker_sequences").values()) == {0.0})
        for worker in fleet.decode:
            fleet.call(worker.resume)
            worker.handled.clear()
        fleet.complete(n=20, **SHORT)
        assert [len(worker.requests("reserve")) for worker in fleet.decode] == [10, 10]
        fleet.assert_idle()


def test_every_request_ends_in_exactly_one_outcome(fleet: Fleet) -> None:
    fleet.complete(**SHORT)
    fleet.stream("/v1/completions", {"prompt": [5]} | SHORT)
    fleet.complete(temperature=-1)
    fleet.decode[0].faults.fail_at = fleet.prefill[0].faults.fail_at = 2
    fleet.complete(**SHORT)
    assert outcomes(fleet) == {
        '{outcome="ok"}': 2,
        '{outcome="invalid_request_error"}': 1,
        '{outcome="peer_error"}': 1,
    }


def test_latencies_tokens_and_hand_offs_are_counted(fleet: Fleet) -> None:
    fleet.complete(**SHORT)
    counted = {
        "pdserve_ttft_seconds_count": 1,
        "pdserve_handoff_gap_seconds_count": 1,
        "pdserve_itl_seconds_count": 2,
        "pdserve_queue_seconds_count": 1,
        "pdserve_prompt_tokens_total": 3,
        "pdserve_output_tokens_total": 4,
        "pdserve_cached_tokens_total": 2,
        "pdserve_fallbacks_total": 0,
    }
    assert {name: samples(fleet, name)[""] for name in counted} == counted
    assert samples(fleet, "pdserve_handoffs_total") == {'{sealed="true",transport="fake"}': 1}


def test_a_fallback_is_counted(fleet: Fleet) -> None:
    fleet.prefill[0].faults.refuse = "too_many_requests"
    fleet.complete(**SHORT)
    assert samples(fleet, "pdserve_fallbacks_total") == {"": 1}
    assert samples(fleet, "pdserve_retries_total") == {'{reason="peer_error"}': 1}


def test_a_router_that_shuts_down_finishes_what_runs_and_refuses_the_rest(fleet: Fleet) -> None:
    fleet.decode[0].faults.pause_at = 3
    stream = OpenStream(fleet, **SHORT)
    stream.read_events(3)
    fleet.call(fleet.service.intake.close)
    assert fleet.complete(**SHORT).status_code == 503
    assert httpx.get(fleet.url + "/ready").json()["problems"] == ["the router is shutting down"]
    assert httpx.get(fleet.url + "/health").status_code == 200
    fleet.call(fleet.decode[0].resume)
    assert stream.rest()[-1] == "[DONE]"
    fleet.thread.run(fleet.service.intake.wait_idle())


def test_answers_that_are_cut_end_with_an_error_event(fleet: Fleet) -> None:
    fleet.decode[0].faults.pause_at = 3
    stream = OpenStream(fleet, **SHORT)
    stream.read_events(3)
    fleet.call(lambda: fleet.service.answerer.cut_all(Overloaded("shutting down", retry_after_s=1.0)))
    assert json.loads(stream.rest()[-1])["error"]["code"] == "overloaded"
