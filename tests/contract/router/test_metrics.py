"""What the router shows to Prometheus: whole, consistent, and as docs/metrics.md says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.fake_worker import FOREVER, says
from tests.support.exposition import Exposition, documented, labels, shown_name
from tests.support.fake_fleet import Fleet, OpenStream, eventually, open_fleet
from tests.support.tiny_tokenizers import byte_level, write_model_folder

OUTPUT = [70 + index for index in range(12)]
WHOLE: dict[str, Any] = {"temperature": 0, "max_tokens": 10}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    card = write_model_folder(tmp_path_factory.mktemp("models") / "tiny", byte_level())
    with open_fleet(card, says(OUTPUT)) as fleet:
        yield fleet
        fleet.assert_idle()


def shown(fleet: Fleet) -> Exposition:
    return Exposition(httpx.get(fleet.url + "/metrics").text)


def test_outcomes_tokens_and_latencies_agree(fleet: Fleet) -> None:
    for _ in range(4):
        assert fleet.complete(**WHOLE).status_code == 200
    assert fleet.complete(model="nope").status_code == 404
    fleet.decode[0].faults.pause_at = 4
    leaving = OpenStream(fleet, **WHOLE)
    leaving.read_events(2)
    leaving.close()
    eventually(lambda: shown(fleet).values("pdserve_requests_total").get(("disconnected",)) == 1)
    after = shown(fleet)
    assert after.values("pdserve_requests_total") == {
        ("ok",): 4,
        ("model_not_found",): 1,
        ("disconnected",): 1,
    }
    num_first = after.total("pdserve_ttft_seconds_count")
    assert num_first == after.total("pdserve_queue_seconds_count") == 5
    assert after.total("pdserve_output_tokens_total") == (
        num_first
        + after.total("pdserve_handoff_gap_seconds_count")
        + after.total("pdserve_itl_seconds_count")
    )
    assert after.total("pdserve_tpot_seconds_count") == after.total("pdserve_handoff_gap_seconds_count")


def test_a_lost_worker_is_a_retry_with_its_reason(tmp_path: Path) -> None:
    card = write_model_folder(tmp_path / "tiny", byte_level())
    with open_fleet(card, says(OUTPUT), num_decode=2) as fleet:
        for worker in fleet.decode:
            worker.faults.pause_at = 4
        stream = OpenStream(fleet, **WHOLE)
        stream.read_events(3)
        busy = next(worker for worker in fleet.decode if worker.num_live)
        other = next(worker for worker in fleet.decode if worker is not busy)
        other.faults.pause_at = FOREVER
        fleet.thread.run(busy.kill())
        assert stream.rest()[-1] == "[DONE]"
        eventually(lambda: shown(fleet).values("pdserve_retries_total") == {("worker_lost",): 1})


def test_what_the_router_shows_is_what_the_table_says(fleet: Fleet) -> None:
    table = documented("Router")
    families = shown(fleet).families
    assert [shown_name(family) for family in families] == list(table)
    for family in families:
        row = table[shown_name(family)]
        assert (family.type, family.documentation) == (row.type, row.meaning), row
        assert labels(family) in ({row.labels} if family.samples else {frozenset()}), row
