"""Which transport is tried first, and what a failed link changes about it."""

import threading

from pdserve.clock import ManualClock
from pdserve.kvcache.layout import KVLayout, PoolOrder
from pdserve.kvcache.storage import KVStorage
from pdserve.transfer.hello import Hello
from pdserve.transfer.ladder import BACK_OFF_S, Ladder
from pdserve.transfer.outbox import Outbox, Ways
from pdserve.transfer.push import Endpoint, PushPlan
from pdserve.transfer.stream import ByteStream, LinkLost

LAYOUT = KVLayout(1, 2, 8, "float32", 4, PoolOrder.HEAD_MAJOR)
ENDPOINTS = tuple(Endpoint(transport, "somewhere") for transport in ("shm", "tcp", "grpc"))
PATIENCE_S = 60.0


def order(ladder: Ladder, now_s: float) -> list[str]:
    return [endpoint.transport for endpoint in ladder.in_order(ENDPOINTS, now_s)]


def test_decodes_order_stands_until_a_link_fails() -> None:
    assert order(Ladder(), 0.0) == ["shm", "tcp", "grpc"]


def test_a_demoted_transport_goes_last_until_the_back_off_is_over() -> None:
    ladder = Ladder()
    ladder.demote("shm", 10.0)
    assert order(ladder, 10.0) == ["tcp", "grpc", "shm"]
    assert ladder.has_demoted(10.0)
    assert order(ladder, 10.0 + BACK_OFF_S) == ["shm", "tcp", "grpc"]
    assert not ladder.has_demoted(10.0 + BACK_OFF_S)


def test_a_transport_is_never_left_out() -> None:
    ladder = Ladder()
    for endpoint in ENDPOINTS:
        ladder.demote(endpoint.transport, 0.0)
    assert order(ladder, 1.0) == ["shm", "tcp", "grpc"]


class Attempts:
    """An outbox whose connections all fail, and what it tried."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.tried: list[str] = []
        self.outbox = Outbox(
            hello=Hello(1, "model", LAYOUT),
            kv=KVStorage(LAYOUT, num_blocks=2),
            ways=Ways({"shm": self._connect, "tcp": self._connect}),
            clock=self.clock,
        )

    def _connect(self, endpoint: Endpoint, limit_s: float) -> ByteStream:
        self.tried.append(endpoint.transport)
        raise LinkLost("nobody there")

    def push(self, number: int, incarnation: int, endpoints: tuple[Endpoint, ...]) -> list[str]:
        """Which transports one push tried, in order."""
        self.tried.clear()
        done = threading.Event()
        plan = PushPlan(f"r{number}", number, number, incarnation, b"", endpoints, (1,), 4, 0)
        self.outbox.open(plan, lambda outcome: done.set())
        assert done.wait(PATIENCE_S)
        return list(self.tried)


def test_the_next_link_to_the_same_peer_starts_with_what_did_not_fail() -> None:
    attempts = Attempts()
    only_shm, both = ENDPOINTS[:1], ENDPOINTS[:2]
    assert attempts.push(1, 7, only_shm) == ["shm"]
    assert attempts.push(2, 7, both) == ["tcp", "shm"]
    assert attempts.push(3, 8, both) == ["shm", "tcp"], "another peer has a ladder of its own"
    attempts.clock.advance(BACK_OFF_S)
    assert attempts.push(4, 7, both) == ["shm", "tcp"]
