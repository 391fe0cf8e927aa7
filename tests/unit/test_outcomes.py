"""Reasons as they come from peers become labels from a known set, and ledgers add up."""

import pytest

from pdserve.errors import EngineFailure
from pdserve.outcomes import abort_label, outcome_label
from pdserve.worker.ledger import Ledger


@pytest.mark.parametrize(
    ("reason", "label"),
    [
        ("", "ok"),
        ("finished", "ok"),
        ("cancelled", "cancelled"),
        ("peer_error: another process has taken the peer's address", "peer_error"),
        (EngineFailure.label, "engine_failure"),
        ("worker_lost", "worker_lost"),
        ("checksum", "checksum"),
        ("something a peer made up, 1f8a", "other"),
    ],
)
def test_a_reason_is_counted_under_a_known_label(reason: str, label: str) -> None:
    assert outcome_label(reason) == label


def test_an_unsealed_hand_off_of_a_finished_request_was_not_needed() -> None:
    assert abort_label("finished") == "not_needed"
    assert outcome_label(abort_label("finished")) == "not_needed"


def test_a_ledger_tells_what_is_open_by_difference() -> None:
    ledger = Ledger()
    for reason in ("", "finished", "retry", "a", "b"):
        ledger.begin()
        ledger.end(reason)
    ledger.begin()
    assert ledger.ended == {"ok": 2, "retry": 1, "other": 2}
    assert (ledger.num_begun, ledger.num_ended, ledger.count("ok")) == (6, 5, 2)
