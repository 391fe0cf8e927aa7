"""Counters of a whole system agree with each other, and with the table in docs/metrics.md."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from bench.cluster import Cluster, Worker, open_cluster
from pdserve.outcomes import SEALED
from tests.support.engines import greedy
from tests.support.exposition import Exposition, documented, labels, shown_name
from tests.support.processes import eventually
from tests.support.tiny_models import tiny_model

PROMPT = [5 + index * 7 % 200 for index in range(40)]
NUM_WHOLE = 6
MAX_TOKENS = 8


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """After whole requests, one that ends with its first token, and aborts in every phase."""
    with open_cluster(tiny_model("llama"), enable_prefix_cache=False) as cluster:
        cluster.generate_all([PROMPT] * NUM_WHOLE, greedy(MAX_TOKENS, ignore_eos=True))
        cluster.generate(PROMPT, greedy(1))
        _abort_while_prefilling(cluster)
        _abort_while_decoding(cluster)
        cluster.assert_blocks_come_back()
        yield cluster


def _abort_while_prefilling(cluster: Cluster) -> None:
    (prefill,) = cluster.prefill
    prefill.gate.clear()
    running = cluster.start(PROMPT, greedy(MAX_TOKENS, ignore_eos=True))
    eventually(lambda: bool(_shown(prefill).values("pdserve_sequences")[("reserved",)]), 5.0)
    running.cancel()
    eventually(lambda: ("cancelled",) in _shown(prefill).values("pdserve_worker_requests_ended_total"), 5.0)
    cluster.thread.run(asyncio.sleep(0))  # past the handler that also posts it to the engine
    prefill.gate.set()


def _abort_while_decoding(cluster: Cluster) -> None:
    (decode,) = cluster.decode
    running = cluster.start(PROMPT, greedy(400, ignore_eos=True))
    eventually(lambda: len(running.progress.output_token_ids) > 3, 5.0)
    running.cancel()
    eventually(decode.is_empty, 5.0)


def _shown(worker: Worker) -> Exposition:
    return Exposition(worker.service.metrics.render().decode())


@pytest.fixture
def prefill(cluster: Cluster) -> Exposition:
    return _shown(cluster.prefill[0])


@pytest.fixture
def decode(cluster: Cluster) -> Exposition:
    return _shown(cluster.decode[0])


def test_every_request_that_began_has_ended_once(prefill: Exposition, decode: Exposition) -> None:
    for worker, begun in ((prefill, NUM_WHOLE + 3), (decode, NUM_WHOLE + 2)):
        assert worker.total("pdserve_worker_requests_total") == begun
        assert worker.total("pdserve_worker_requests_ended_total") == begun
    assert decode.values("pdserve_worker_requests_ended_total") == {("ok",): NUM_WHOLE, ("cancelled",): 2}


def test_both_ends_of_hand_offs_tell_the_same(prefill: Exposition, decode: Exposition) -> None:
    sent = prefill.values("pdserve_prefill_handoffs_ended_total")
    received = decode.values("pdserve_reservations_ended_total")
    assert sent == received == {(SEALED,): NUM_WHOLE + 1, ("cancelled",): 1}
    assert prefill.total("pdserve_prefill_handoffs_total") == sum(sent.values())
    assert decode.total("pdserve_reservations_total") == sum(received.values())


def test_transfers_are_told_by_transport(prefill: Exposition, decode: Exposition) -> None:
    (sent,) = prefill.values("pdserve_kv_sent_bytes_total").items()
    assert sent[0] == ("tcp",)
    assert sent[1] >= decode.total("pdserve_kv_landed_bytes_total") > 0
    hidden_s = prefill.total("pdserve_kv_hidden_transfer_seconds_total")
    assert 0 <= hidden_s <= prefill.total("pdserve_kv_transfer_seconds_total")
    assert prefill.total("pdserve_prefill_queue_seconds_count") == NUM_WHOLE + 1


def test_blocks_by_state_add_up_to_the_pool(
    cluster: Cluster, prefill: Exposition, decode: Exposition
) -> None:
    for worker, shown in zip(cluster.all_workers, (prefill, decode), strict=True):
        assert shown.total("pdserve_kv_blocks") == worker.stats.num_usable_blocks


def test_tokens_sampled_are_those_of_prefill_and_decode(prefill: Exposition, decode: Exposition) -> None:
    assert prefill.total("pdserve_engine_generated_tokens_total") >= NUM_WHOLE + 2
    assert decode.total("pdserve_engine_generated_tokens_total") >= NUM_WHOLE * (MAX_TOKENS - 1)


def test_what_workers_show_is_what_the_table_says(prefill: Exposition, decode: Exposition) -> None:
    for shown, section in ((prefill, "Prefill workers"), (decode, "Decode workers")):
        table = documented("Both kinds of worker") | documented(section)
        assert [shown_name(family) for family in shown.families] == list(table)
        for family in shown.families:
            row = table[shown_name(family)]
            assert (family.type, family.documentation) == (row.type, row.meaning), row
            assert labels(family) in ({row.labels} if family.samples else {frozenset()}), row
