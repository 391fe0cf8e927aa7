"""Mistakes of clients come back as OpenAI's error objects, and no worker hears of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.fakes.fake_worker import says
from tests.support.fake_fleet import MODEL, Fleet, open_fleet
from tests.support.tiny_tokenizers import byte_level, write_model_folder

KEY = "s3cret-key"
LIMIT_BYTES = 100_000


@pytest.fixture(scope="module")
def shared_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    card = write_model_folder(tmp_path_factory.mktemp("model"), byte_level())
    with open_fleet(card, says([70, 71]), max_body_bytes=LIMIT_BYTES) as fleet:
        yield fleet


@pytest.fixture
def fleet(shared_fleet: Fleet) -> Iterator[Fleet]:
    """No request of these tests may reach a worker."""
    yield shared_fleet
    shared_fleet.assert_idle()
    for worker in shared_fleet.workers:
        assert [message for message in worker.handled if not message.HasField("heartbeat")] == []


def error_of(response: httpx.Response) -> dict[str, Any]:
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert isinstance(error, dict)
    return error


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "code"),
    [
        ("GET", "/nowhere", b"", 404, "invalid_request_error"),
        ("GET", "/v1/completions", b"", 405, "invalid_request_error"),
        ("POST", "/v1/completions", b"{", 400, "invalid_request_error"),
        ("POST", "/v1/completions", b"", 400, "invalid_request_error"),
        ("POST", "/v1/completions", b'{"model": "tiny"}', 400, "invalid_request_error"),
        ("POST", "/v1/completions", b'{"prompt": "a"}', 400, "invalid_request_error"),
        ("POST", "/v1/completions", b'{"model": 5, "prompt": "a"}', 400, "invalid_request_error"),
        ("POST", "/v1/completions", b'{"model": "nope", "prompt": "a"}', 404, "model_not_found"),
        ("POST", "/v1/chat/completions", b'{"model": "tiny", "messages": []}', 400, "invalid_request_error"),
        ("GET", "/v1/models/nope", b"", 404, "model_not_found"),
    ],
)
def test_what_cannot_be_is_an_error_object(
    fleet: Fleet, method: str, path: str, content: bytes, status: int, code: str
) -> None:
    response = httpx.request(method, fleet.url + path, content=content)
    assert response.status_code == status
    assert error_of(response)["code"] == code


def test_a_prompt_over_the_context_is_told_both_lengths(fleet: Fleet) -> None:
    response = fleet.complete(prompt=[5] * 256)
    assert response.status_code == 400
    error = error_of(response)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert "256" in error["message"]


def test_a_body_over_the_limit_is_refused_with_the_limit(fleet: Fleet) -> None:
    response = fleet.complete(prompt="a" * LIMIT_BYTES)
    assert response.status_code == 413
    assert str(LIMIT_BYTES) in error_of(response)["message"]


def test_a_body_that_hides_its_length_is_counted_all_the_same(fleet: Fleet) -> None:
    """In chunks, and far over the limit."""
    chunks = (b"x" * 65536 for _ in range(320))
    response = httpx.post(fleet.url + "/v1/completions", content=chunks, timeout=10.0)
    assert response.status_code == 413


def test_openais_client_raises_its_own_errors(fleet: Fleet) -> None:
    with openai.OpenAI(base_url=fleet.url + "/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="nope", prompt="a")
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model=MODEL, prompt="a", temperature=-1)


@pytest.mark.parametrize(
    ("given", "echoed"),
    [("abc-1", "abc-1"), ("a/b c", "a/b_c"), ("é", "__"), ("x" * 5000, "x" * 128), ("a\tb", "a_b")],
)
def test_the_clients_id_is_echoed_harmless_and_bounded(fleet: Fleet, given: str, echoed: str) -> None:
    response = httpx.get(fleet.url + "/v1/models", headers={b"x-request-id": given.encode()})
    assert response.headers["x-request-id"] == echoed


def test_an_answer_without_a_clients_id_gets_one_even_if_it_is_an_error(fleet: Fleet) -> None:
    ids = {httpx.get(fleet.url + "/nowhere").headers["x-request-id"] for _ in range(2)}
    assert len(ids) == 2


def test_models_lists_the_served_name_and_its_context(fleet: Fleet) -> None:
    models = httpx.get(fleet.url + "/v1/models").json()
    assert [(model["id"], model["max_model_len"]) for model in models["data"]] == [(MODEL, 256)]
    assert httpx.get(fleet.url + f"/v1/models/{MODEL}").json() == models["data"][0]


def test_refusals_are_counted_by_their_label(fleet: Fleet) -> None:
    metric = 'pdserve_requests_total{outcome="model_not_found"}'
    before = sample(fleet, metric)
    fleet.complete(model="nope")
    assert sample(fleet, metric) == before + 1


def sample(fleet: Fleet, metric: str) -> float:
    lines = httpx.get(fleet.url + "/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(metric))


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": KEY}, 401),
        ({"authorization": "Bearer é".encode()}, 401),
        ({"authorization": f"Bearer {KEY}"}, 200),
        ({"authorization": f"bearer {KEY}"}, 200),
    ],
    ids=str,
)
def test_with_keys_only_their_holders_are_served(
    tmp_path_factory: pytest.TempPathFactory, header: dict[str, Any], status: int
) -> None:
    card = write_model_folder(tmp_path_factory.mktemp("model"), byte_level())
    with open_fleet(card, says([70, 71]), num_prefill=0, api_keys=["another", KEY]) as fleet:
        assert fleet.post("/v1/completions", {"prompt": "a"}, headers=header).status_code == status
        assert httpx.get(fleet.url + "/v1/models", headers=header).status_code == status
        assert httpx.get(fleet.url + "/health").status_code == 200
        fleet.assert_idle()
