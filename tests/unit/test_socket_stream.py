"""The two directions of a socket do not share a wait, and closing frees nothing under a waiting thread."""

import math
import socket
import threading
import time

import pytest

from pdserve.transfer.socket_stream import SocketStream
from pdserve.transfer.stream import LinkLost

LIMIT_S = 5.0


def test_a_send_to_a_full_peer_returns_in_time_while_the_other_direction_waits_for_ever() -> None:
    ours, theirs = socket.socketpair()
    stream = SocketStream(ours)
    heard: list[bytes] = []

    def read() -> None:
        buffer = bytearray(1)
        try:
            while True:
                heard.append(bytes(buffer[: stream.receive_some([memoryview(buffer)], math.inf)]))
        except LinkLost:
            return

    reader = threading.Thread(target=read)
    reader.start()
    full = [memoryview(bytes(1 << 20))]
    while stream.send_some(full, 0.0):
        pass
    for _ in range(20):
        theirs.send(b"x")  # wakes the reader, which then waits without a limit again
        begin_s = time.monotonic()
        assert stream.send_some(full, 0.02) == 0
        assert time.monotonic() - begin_s < 1.0
    stream.close()
    reader.join(LIMIT_S)
    assert not reader.is_alive()
    assert heard
    assert ours.fileno() == -1
    with pytest.raises(LinkLost):
        stream.send_some(full, 0.0)
    theirs.close()


def test_a_peer_that_hangs_up_is_a_lost_link() -> None:
    ours, theirs = socket.socketpair()
    stream = SocketStream(ours)
    theirs.close()
    with pytest.raises(LinkLost):
        stream.receive_some([memoryview(bytearray(1))], LIMIT_S)
    stream.close()
    stream.close()
