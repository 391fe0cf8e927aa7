"""Whatever a client sends, it gets a clear answer and everybody else is served on."""

import json
from typing import Any

import pytest

from tests.support.model_folder import text_of
from tests.support.processes import Processes
from tests.support.tiny_models import VOCAB_SIZE

pytestmark = pytest.mark.e2e

GOOD = {"model": "tiny", "prompt": "t5 t6 t7", "max_tokens": 2, "temperature": 0}
CASES: dict[str, tuple[dict[str, Any] | str, int, str]] = {
    "broken JSON": ('{"model": ', 400, "not valid JSON"),
    "not an object": ("[1]", 400, "must be a JSON object"),
    "NaN": ('{"model": "tiny", "prompt": "t5", "temperature": NaN}', 400, "NaN"),
    "wrong type": ({"max_tokens": "many"}, 400, "max_tokens"),
    "unknown model": ({"model": "gpt-9"}, 404, "gpt-9"),
    "no model": ({"model": None}, 400, "model"),
    "too long": ({"prompt": text_of([5] * 4200)}, 400, "4200 tokens, the context 4096"),
    "outside the vocabulary": ({"prompt": [5, VOCAB_SIZE]}, 400, f"token id {VOCAB_SIZE}"),
    "negative token id": ({"prompt": [-1]}, 400, "-1"),
    "a boolean as token id": ({"prompt": [True]}, 400, "prompt"),
    "empty text": ({"prompt": ""}, 400, "empty"),
    "empty list": ({"prompt": []}, 400, "empty"),
    "empty token list": ({"prompt": [[]]}, 400, "empty"),
    "negative temperature": ({"temperature": -0.5}, 400, "temperature"),
    "no tokens": ({"max_tokens": 0}, 400, "max_tokens"),
    "n of nothing": ({"n": 0}, 400, "n"),
    "stream_options without stream": ({"stream_options": {"include_usage": True}}, 400, "stream"),
    "empty stop": ({"stop": ""}, 400, "stop"),
    "five stops": ({"stop": ["a", "b", "c", "d", "e"]}, 400, "stop"),
    "bias of no token": ({"logit_bias": {"x": 1}}, 400, "logit_bias"),
    "bias outside the vocabulary": ({"logit_bias": {str(VOCAB_SIZE): 1}}, 400, "logit_bias"),
    "best_of": ({"best_of": 3}, 400, "best_of"),
    "suffix": ({"suffix": "x"}, 400, "suffix"),
}


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_bad_request_is_told_what_is_wrong(processes: Processes, name: str) -> None:
    change, status, message = CASES[name]
    body = change if isinstance(change, str) else json.dumps(GOOD | change)
    response = processes.client.post(f"{processes.url}/v1/completions", content=body)
    error = response.json()["error"]
    assert response.status_code == status, response.text
    assert message in error["message"] + str(error["param"])
    assert processes.text("t5 t6 t7", max_tokens=2)


def test_a_body_over_the_limit_is_413(processes: Processes) -> None:
    body = json.dumps(GOOD | {"prompt": "t5 " * 7_000_000})
    response = processes.client.post(f"{processes.url}/v1/completions", content=body)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"


def test_unknown_fields_are_accepted(processes: Processes) -> None:
    assert processes.text("t5 t6 t7", max_tokens=2, some_field={"a": 1}) == processes.text(
        "t5 t6 t7", max_tokens=2
    )


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/v1/nope", 404), ("GET", "/v1/completions", 405)]
)
def test_wrong_routes_are_openai_errors(processes: Processes, method: str, path: str, status: int) -> None:
    response = processes.client.request(method, processes.url + path)
    assert response.status_code == status
    assert "message" in response.json()["error"]
