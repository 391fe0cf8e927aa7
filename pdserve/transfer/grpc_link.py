"""KV through the worker's gRPC port, where only that one can be reached. Several times slower than tcp.

A bidirectional stream of raw bytes (no protobuf: it would cost four copies), messages of up to
1 MiB, on the same server as the control plane. The event loop only passes messages on; frames
are read on a thread of the link's own.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import grpc

from pdserve.clock import Clock
from pdserve.transfer.landing import LandingTable
from pdserve.transfer.push import Endpoint
from pdserve.transfer.receiver import serve_link
from pdserve.transfer.stream import LinkLost

NAME = "grpc"
SERVICE = "pdserve.rpc.v1.KVLink"
METHOD = "Push"
MESSAGE_BYTES = 1 << 20
MAX_MESSAGES_IN_FLIGHT = 4
OPTIONS = [
    ("grpc.max_receive_message_length", 2 * MESSAGE_BYTES),
    ("grpc.max_send_message_length", 2 * MESSAGE_BYTES),
]


def _gather(views: Sequence[memoryview]) -> bytes:
    """One message out of the first bytes of the views."""
    parts: list[memoryview] = []
    room = MESSAGE_BYTES
    for view in views:
        parts.append(view[:room])
        room -= len(parts[-1])
        if not room:
            break
    return b"".join(parts)


class _Incoming:
    """Messages as a stream of bytes: a bounded queue whose end is a None."""

    def __init__(self) -> None:
        self._messages: queue.Queue[bytes | None] = queue.Queue()
        self._rest = memoryview(b"")
        self._ended = False

    def put(self, message: bytes | None) -> None:
        self._messages.put(message)

    def take(self, views: Sequence[memoryview], wait_s: float) -> tuple[int, int]:
        """Bytes filled and messages used up. Raises ``LinkLost`` at the end."""
        filled = finished = 0
        for view in views:
            begin = 0
            while begin < len(view):
                if not self._rest and not self._next(wait_s, must_wait=not filled):
                    return filled, finished
                part = self._rest[: len(view) - begin]
                view[begin : begin + len(part)] = part
                begin += len(part)
                self._rest = self._rest[len(part) :]
                filled += len(part)
                finished += not self._rest
        return filled, finished

    def _next(self, wait_s: float, *, must_wait: bool) -> bool:
        if self._ended:
            raise LinkLost("grpc: the stream ended")
        try:
            timeout = None if math.isinf(wait_s) else wait_s
            message = self._messages.get(block=must_wait, timeout=timeout)
        except queue.Empty:
            return False
        if message is None:
            self._ended = True
            if must_wait:
                raise LinkLost("grpc: the stream ended")
            return False
        self._rest = memoryview(message)
        return True


class GrpcClientStream:
    """Prefill's end."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, options=OPTIONS)
        self._outgoing: queue.Queue[bytes | None] = queue.Queue(MAX_MESSAGES_IN_FLIGHT)
        self._incoming = _Incoming()
        self._closed = threading.Event()
        self._call: Any = None

    def open(self, limit_s: float) -> None:
        """Raises ``LinkLost`` when the peer does not answer in time."""
        try:
            grpc.channel_ready_future(self._channel).result(timeout=limit_s)
        except grpc.FutureTimeoutError:
            self._channel.close()
            raise LinkLost(f"grpc: no connection within {limit_s:g} s") from None
        method = self._channel.stream_stream(
            f"/{SERVICE}/{METHOD}", request_serializer=_identity, response_deserializer=_identity
        )
        self._call = method(self._requests())
        threading.Thread(target=self._receive, name="kv-grpc-replies", daemon=True).start()

    def send_some(self, views: Sequence[memoryview], wait_s: float) -> int:
        if self._closed.is_set():
            raise LinkLost("grpc: closed")
        message = _gather(views)
        try:
            self._outgoing.put(message, timeout=None if math.isinf(wait_s) else wait_s)
        except queue.Full:
            return 0
        return len(message)

    def receive_some(self, views: Sequence[memoryview], wait_s: float) -> int:
        return self._incoming.take(views, wait_s)[0]

    def close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            self._incoming.put(None)
            self._call.cancel()
            self._channel.close()

    def _requests(self) -> Iterator[bytes]:
        while not self._closed.is_set():
            try:
                message = self._outgoing.get(timeout=1.0)
            except queue.Empty:
                continue  # looks whether the link was closed
            if message is not None:
                yield message

    def _receive(self) -> None:
        try:
            for message in self._call:
                self._incoming.put(message)
        except grpc.RpcError:
            pass  # the end of the stream below says it to whoever reads
        self._closed.set()
        self._incoming.put(None)


class _ServerStream:
    """Decode's end: filled by the event loop, read by the link's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._incoming = _Incoming()
        self._credits = asyncio.Semaphore(MAX_MESSAGES_IN_FLIGHT)
        self._outgoing: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._closed = False

    def send_some(self, views: Sequence[memoryview], wait_s: float) -> int:
        del wait_s  # replies are small and few
        if self._closed:
            raise LinkLost("grpc: closed")
        message = _gather(views)
        self._on_loop(self._outgoing.put_nowait, message)
        return len(message)

    def receive_some(self, views: Sequence[memoryview], wait_s: float) -> int:
        filled, finished = self._incoming.take(views, wait_s)
        if finished:
            self._on_loop(self._give_credits, finished)
        return filled

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._incoming.put(None)
            self._on_loop(self._outgoing.put_nowait, None)

    async def feed(self, requests: AsyncIterator[bytes]) -> None:
        async for message in requests:
            await self._credits.acquire()
            self._incoming.put(message)

    async def replies(self) -> AsyncIterator[bytes]:
        while (message := await self._outgoing.get()) is not None:
            yield message

    def _give_credits(self, count: int) -> None:
        for _ in range(count):
            self._credits.release()

    def _on_loop(self, function: Any, *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError as error:  # the event loop has been closed
            raise LinkLost(f"grpc: {error}") from error


def _identity(data: bytes) -> bytes:
    return data


def connect(endpoint: Endpoint, limit_s: float) -> GrpcClientStream:
    stream = GrpcClientStream(endpoint.address)
    stream.open(limit_s)
    return stream


def handler(table: LandingTable, clock: Clock) -> grpc.GenericRpcHandler[bytes, bytes]:
    """To be added to the worker's ``grpc.aio`` server."""

    async def push(
        requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> AsyncIterator[bytes]:
        del context
        stream = _ServerStream(asyncio.get_running_loop())
        threading.Thread(
            target=serve_link, args=(stream, table, clock), name="kv-receive", daemon=True
        ).start()
        feeder = asyncio.create_task(stream.feed(requests))
        feeder.add_done_callback(lambda task: stream.close())
        try:
            async for reply in stream.replies():
                yield reply
        finally:
            feeder.cancel()
            stream.close()

    method = grpc.stream_stream_rpc_method_handler(
        push, request_deserializer=_identity, response_serializer=_identity
    )
    return grpc.method_handlers_generic_handler(SERVICE, {METHOD: method})
