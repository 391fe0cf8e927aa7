"""The page's files and ``GET /system``, which it shows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve_router.page import FILES
from tests.fakes.fake_worker import says
from tests.support.fake_fleet import Fleet, eventually, open_fleet
from tests.support.tiny_tokenizers import byte_level, write_model_folder

KEY = {"authorization": "Bearer key-1"}


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    card = write_model_folder(tmp_path / "tiny", byte_level())
    with open_fleet(card, says([70]), api_keys=["key-1"]) as fleet:
        yield fleet


def system(fleet: Fleet) -> dict[str, Any]:
    response = httpx.get(fleet.url + "/system", headers=KEY)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


@pytest.mark.parametrize("path", FILES)
def test_the_files_need_no_key_and_allow_no_foreign_content(fleet: Fleet, path: str) -> None:
    response = httpx.get(fleet.url + path)
    assert response.status_code == 200
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert "http:" not in response.text.replace("http://www.w3.org/2000/svg", "")
    assert "https:" not in response.text


def test_the_system_is_told_to_those_with_a_key_alone(fleet: Fleet) -> None:
    assert httpx.get(fleet.url + "/system").status_code == 401


def test_blocks_and_sequences_are_those_of_the_metrics(fleet: Fleet) -> None:
    exposition = httpx.get(fleet.url + "/metrics").text
    workers = system(fleet)["workers"]
    assert {worker["role"] for worker in workers} == {"prefill", "decode"}
    for worker in workers:
        for kind in ("blocks", "sequences"):
            for state, count in worker[kind].items():
                labels = f'role="{worker["role"]}",state="{state}",worker="{worker["address"]}"'
                assert f"pdserve_worker_{kind}{{{labels}}} {float(count)}" in exposition


def test_percentiles_come_with_the_first_answer(fleet: Fleet) -> None:
    assert not any(system(fleet)["percentiles_ms"]["ttft"])
    assert fleet.complete(headers=KEY, max_tokens=4).status_code == 200
    percentiles = system(fleet)["percentiles_ms"]
    for kind in ("ttft", "itl", "handoff_gap"):
        (measured,) = filter(None, percentiles[kind])
        assert 0 <= measured["p50"] <= measured["p95"]


def test_a_lost_worker_is_down_and_counts_nothing(fleet: Fleet) -> None:
    fleet.thread.run(fleet.prefill[0].kill())
    eventually(lambda: system(fleet)["workers"][0]["state"] == "down")
    assert "blocks" not in system(fleet)["workers"][0]
