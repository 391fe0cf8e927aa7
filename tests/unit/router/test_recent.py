"""Percentiles of the last minutes."""

from __future__ import annotations

from pdserve.timeline import Timeline
from pdserve_router.recent import NUM_SLICES, SLICE_S, Recent

TIMELINE = Timeline(received_s=0.0, token_times_s=[0.5, 0.75, 0.875, 1.0])


def test_each_kind_is_taken_from_the_timeline() -> None:
    recent = Recent()
    recent.ended(TIMELINE, 1.0)
    newest = {kind: entries[-1] for kind, entries in recent.percentiles_ms(1.0).items()}
    assert newest == {
        "ttft": {"p50": 500.0, "p95": 500.0},
        "itl": {"p50": 125.0, "p95": 125.0},
        "handoff_gap": {"p50": 250.0, "p95": 250.0},
    }


def test_a_slice_moves_back_and_is_forgotten() -> None:
    recent = Recent()
    recent.ended(TIMELINE, 1.0)
    entries = recent.percentiles_ms(1.0 + 3 * SLICE_S)["ttft"]
    assert [index for index, entry in enumerate(entries) if entry] == [NUM_SLICES - 4]
    assert not any(recent.percentiles_ms(1.0 + NUM_SLICES * SLICE_S)["ttft"])


def test_of_many_the_ranks_count() -> None:
    recent = Recent()
    for ttft_s in range(101):
        recent.ended(Timeline(received_s=0.0, token_times_s=[float(ttft_s)]), 1.0)
    assert recent.percentiles_ms(1.0)["ttft"][-1] == {"p50": 50_000.0, "p95": 95_000.0}
