"""``GET /workers``: what the router knows of its workers, for those who may ask."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.fakes.fake_worker import says
from tests.support.fake_fleet import Fleet, eventually, open_fleet
from tests.support.tiny_tokenizers import byte_level, write_model_folder

KEY = {"authorization": "Bearer key-1"}


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    card = write_model_folder(tmp_path / "tiny", byte_level())
    with open_fleet(card, says([70]), api_keys=["key-1"]) as fleet:
        yield fleet


def states(fleet: Fleet) -> dict[str, str]:
    body = httpx.get(fleet.url + "/workers", headers=KEY).json()
    return {worker["role"]: worker["state"] for worker in body["workers"]}


def test_each_worker_is_told_with_its_state(fleet: Fleet) -> None:
    assert states(fleet) == {"prefill": "ready", "decode": "ready"}
    fleet.decode[0].draining = True
    fleet.prefill[0].last_step_age_s = 60.0
    eventually(lambda: states(fleet) == {"prefill": "stuck", "decode": "draining"})


def test_a_lost_worker_is_down_and_has_a_problem(fleet: Fleet) -> None:
    fleet.thread.run(fleet.prefill[0].kill())
    eventually(lambda: states(fleet)["prefill"] == "down")
    worker = httpx.get(fleet.url + "/workers", headers=KEY).json()["workers"][0]
    assert worker["address"] == fleet.prefill[0].address
    assert worker["problem"]


def test_without_a_key_nothing_is_told(fleet: Fleet) -> None:
    assert httpx.get(fleet.url + "/workers").status_code == 401
