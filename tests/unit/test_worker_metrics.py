"""A worker's metrics over HTTP: on a port when it is given one, gone with the block."""

import httpx
import pytest

from pdserve.errors import ConfigError
from pdserve.rpc.status import blocks_by_state
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.tracing import NoTracer
from pdserve.worker.directory import RequestDirectory
from pdserve.worker.metrics import WorkerMetrics, shown
from tests.support.processes import free_port

STATUS = pb.WorkerStatus(num_free_blocks=7, num_cached_blocks=3, num_owned_blocks=2, num_quarantined_blocks=1)


@pytest.fixture
def metrics() -> WorkerMetrics:
    return WorkerMetrics(
        lambda: STATUS, RequestDirectory(max_num_requests=1, role="decode", tracer=NoTracer())
    )


def test_they_are_shown_at_the_port_given_until_the_worker_stops(metrics: WorkerMetrics) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/metrics"
    with shown(metrics, "127.0.0.1", port):
        assert 'pdserve_kv_blocks{state="cached"} 3.0' in httpx.get(url).text
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


def test_a_port_in_use_is_for_the_operator_to_mend(metrics: WorkerMetrics) -> None:
    port = free_port()
    with (
        shown(metrics, "127.0.0.1", port),
        pytest.raises(ConfigError, match=str(port)),
        shown(metrics, "127.0.0.1", port),
    ):
        pass


def test_a_block_is_in_one_state() -> None:
    assert blocks_by_state(STATUS) == {"free": 4, "cached": 3, "owned": 1, "quarantined": 1}


def test_shared_blocks_in_quarantine_are_not_counted_twice() -> None:
    status = pb.WorkerStatus(num_free_blocks=1, num_owned_blocks=2, num_quarantined_blocks=4)
    assert sum(blocks_by_state(status).values()) == 3
