"""Whenever a request is given up, all blocks of both workers are free within 250 ms."""

import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf

import pytest
from transformers import PreTrainedModel

from bench.cluster import Cluster, Running, open_cluster
from pdserve.engine.sequence import Sequence
from pdserve.transfer.stream import ByteStream
from pdserve_prefill.service import PrefillService
from tests.support.engines import greedy
from tests.support.tiny_models import VOCAB_SIZE, tiny_model

PROMPT = [3 + index * 7 % (VOCAB_SIZE - 3) for index in range(50)]
LONG = greedy(400, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


def eventually(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, "what the test waits for did not happen"
        threading.Event().wait(0.002)


class StalledStream:
    """Takes ``num_bytes`` and then nothing, like a peer that is stopped."""

    def __init__(self, inner: ByteStream, num_bytes: int) -> None:
        self._inner = inner
        self._left = num_bytes

    def send_some(self, views: SequenceOf[memoryview], wait_s: float) -> int:
        if self._left <= 0:
            threading.Event().wait(wait_s)
            return 0
        data = memoryview(b"".join(views)[: self._left])
        sent = self._inner.send_some([data], wait_s)
        self._left -= sent
        return sent

    def receive_some(self, views: SequenceOf[memoryview], wait_s: float) -> int:
        return self._inner.receive_some(views, wait_s)

    def close(self) -> None:
        self._inner.close()


# Each brings a request into a phase and returns what lets the workers go on afterwards.


def queued(cluster: Cluster) -> tuple[Running, Callable[[], None]]:
    """Waiting in the router because another's reservation takes up decode."""
    decode = cluster.decode[0]
    engine, loop = decode.built.engine, decode.service.engine_loop
    num_tokens = (decode.stats.num_usable_blocks - 1) * decode.built.storage.layout.block_size
    assert loop.call(lambda: engine.hold(Sequence("other", [3] * num_tokens, greedy(1)))).result(5.0)
    running = cluster.start(PROMPT, LONG)
    eventually(lambda: cluster.generation._admission.num_waiting > 0)
    return running, lambda: loop.post(lambda: engine.abort("other"))


def reserved(cluster: Cluster) -> tuple[Running, Callable[[], None]]:
    """Decode has blocks for it, prefill has not begun."""
    go_on = threading.Event()

    def wait() -> None:
        go_on.wait(10.0)

    cluster.prefill[0].service.engine_loop.post(wait)
    running = cluster.start(PROMPT, LONG)
    eventually(lambda: cluster.decode[0].stats.num_held == 1)
    return running, go_on.set


def prefilling(cluster: Cluster) -> tuple[Running, Callable[[], None]]:
    """Between two layers of the prompt."""
    worker = cluster.prefill[0]
    worker.gate.clear()
    running = cluster.start(PROMPT, LONG)
    eventually(lambda: cluster.decode[0].stats.num_held == 1)
    return running, worker.gate.set


def transferring(cluster: Cluster) -> tuple[Running, Callable[[], None]]:
    """In the middle of a frame that never ends."""
    cluster.wrap_stream = lambda stream: StalledStream(stream, 900)
    running = cluster.start(PROMPT, LONG)
    eventually(lambda: len(running.progress.output_token_ids) == 1)
    return running, lambda: None


def decoding(cluster: Cluster) -> tuple[Running, Callable[[], None]]:
    running = cluster.start(PROMPT, LONG)
    eventually(lambda: len(running.progress.output_token_ids) > 3)
    return running, lambda: None


PHASES = [queued, reserved, prefilling, transferring, decoding]


@pytest.fixture(params=["shm", "tcp", "grpc"])
def cluster(request: pytest.FixtureRequest, model: PreTrainedModel) -> Iterator[Cluster]:
    with open_cluster(model, transport=request.param, decode_num_blocks=60) as cluster:
        yield cluster


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.__name__)
@pytest.mark.parametrize("ending", ["disconnect", "deadline"])
def test_a_request_that_is_given_up_frees_everything(
    cluster: Cluster, phase: Callable[[Cluster], tuple[Running, Callable[[], None]]], ending: str
) -> None:
    running, go_on = phase(cluster)
    if ending == "disconnect":
        running.cancel()
    else:
        cluster.expire(running)
    go_on()
    cluster.assert_blocks_come_back()
    cluster.wrap_stream = lambda stream: stream
    cluster.generate(PROMPT, greedy(3))
    cluster.assert_blocks_come_back()


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.__name__)
def test_a_router_that_is_gone_frees_everything(
    cluster: Cluster, phase: Callable[[Cluster], tuple[Running, Callable[[], None]]]
) -> None:
    """Its sessions end; nobody sends a release."""
    _, go_on = phase(cluster)
    for client in (*cluster.workers.prefill, *cluster.workers.decode):
        cluster.thread.loop.call_soon_threadsafe(client.hang_up)
    go_on()
    cluster.assert_blocks_come_back()


def test_after_the_last_token_everything_is_free(cluster: Cluster) -> None:
    cluster.generate_all([PROMPT, PROMPT[:9], PROMPT[5:]], greedy(20))
    cluster.assert_blocks_come_back()


def test_a_stalled_hand_off_ends_by_itself_and_the_text_goes_on(model: PreTrainedModel) -> None:
    """Nobody cancels: the link's no-progress limit does, and the next attempt succeeds."""
    with open_cluster(model) as cluster:
        expected = cluster.generate(PROMPT, greedy(12))
        wrapped = []

        def stall_first(stream: ByteStream) -> ByteStream:
            wrapped.append(stream)
            return StalledStream(stream, 900) if len(wrapped) == 1 else stream

        service = cluster.prefill[0].service
        assert isinstance(service, PrefillService)
        service.outbox.close()  # so that the next push makes a new link
        cluster.wrap_stream = stall_first
        other = [5, *PROMPT]
        tokens = cluster.generate(other, greedy(12))
        assert len(wrapped) == 2
        cluster.assert_blocks_come_back()
        assert tokens == cluster.generate(other, greedy(12))
        assert expected == cluster.generate(PROMPT, greedy(12))
