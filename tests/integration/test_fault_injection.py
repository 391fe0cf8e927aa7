"""Links that cut themselves and flip bits: no wrong token, no lost block, no request without an answer."""

import random
from collections.abc import Sequence

import pytest

from bench.cluster import open_cluster
from pdserve.transfer.stream import ByteStream, LinkLost
from tests.support.engines import greedy
from tests.support.tiny_models import VOCAB_SIZE, tiny_model

NUM_REQUESTS = 240
AT_ONCE = 12
MAX_TOKENS = 10


class UnreliableStream:
    """Now and then, at a random place, flips a bit or cuts itself."""

    def __init__(self, inner: ByteStream, rng: random.Random) -> None:
        self._inner = inner
        self._rng = rng
        self._until_fault = rng.randrange(400, 120_000)
        self._flip_next = False

    def send_some(self, views: Sequence[memoryview], wait_s: float) -> int:
        data = bytearray(b"".join(views)[: self._until_fault])
        if self._flip_next:
            data[0] ^= 1 << self._rng.randrange(8)
        sent = self._inner.send_some([memoryview(data)], wait_s)
        self._until_fault -= sent
        self._flip_next = self._flip_next and not sent
        if sent and not self._until_fault:
            self._fault()
        return sent

    def _fault(self) -> None:
        """Takes the place of the next byte, or of all that follow."""
        self._until_fault = self._rng.randrange(400, 120_000)
        if self._rng.random() < 0.5:
            self._inner.close()
            raise LinkLost("cut on purpose")
        self._flip_next = True

    def receive_some(self, views: Sequence[memoryview], wait_s: float) -> int:
        return self._inner.receive_some(views, wait_s)

    def close(self) -> None:
        self._inner.close()


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_every_answer_over_unreliable_links_is_the_right_one(transport: str) -> None:
    rng = random.Random(5)
    prompts = [
        [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(4, 70))] for _ in range(NUM_REQUESTS)
    ]
    batches = [prompts[begin : begin + AT_ONCE] for begin in range(0, NUM_REQUESTS, AT_ONCE)]
    model = tiny_model("llama")
    with open_cluster(model, num_prefill=0, num_blocks=200) as sound:
        expected = [tokens for some in batches for tokens in sound.generate_all(some, greedy(MAX_TOKENS))]
    with open_cluster(
        model, transport=transport, num_prefill=2, num_decode=2, num_blocks=200, enable_prefix_cache=False
    ) as cluster:
        num_links = 0

        def unreliable(stream: ByteStream) -> ByteStream:
            nonlocal num_links
            num_links += 1
            return UnreliableStream(stream, rng)

        cluster.wrap_stream = unreliable
        answers = [tokens for some in batches for tokens in cluster.generate_all(some, greedy(MAX_TOKENS))]
        assert answers == expected
        cluster.assert_blocks_come_back(1.0)
        aborted = sum(worker.service.status().counters["handoffs_aborted"] for worker in cluster.decode)
        sealed = sum(worker.service.status().counters["handoffs_sealed"] for worker in cluster.decode)
        assert num_links > 10, "the links were not unreliable"
        assert aborted > 10
        assert sealed > 50
