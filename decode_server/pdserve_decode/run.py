"""Runs the decode worker: everything that needs torch. ``main`` reads the settings first."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import grpc

from pdserve import tracing
from pdserve.clock import Clock, MonotonicClock
from pdserve.config import secret_bytes
from pdserve.engine.build import BuiltEngine, build_engine
from pdserve.errors import ConfigError
from pdserve.model.embedded import resolve_model
from pdserve.rpc.session import SessionServer
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.tracing import Tracer
from pdserve.transfer import grpc_link, shm, tcp
from pdserve.worker import program
from pdserve.worker.directory import RequestDirectory
from pdserve.worker.identity import new_incarnation
from pdserve.worker.metrics import shown
from pdserve.worker.status import worker_identity
from pdserve_decode.config import DecodeSettings
from pdserve_decode.service import DecodeService


def run(settings: DecodeSettings, environment: Mapping[str, str]) -> None:
    """Loads the model and serves until a signal. Raises ``ConfigError`` or ``UnsupportedModel``."""
    secret = secret_bytes(settings.secret, settings.host)
    path = resolve_model(settings.model)
    built = build_engine(path, settings.engine_config(prefill_chunk_tokens=settings.prefill_chunk_tokens))
    # What is loaded stays: no collection needs to look at it again.
    gc.collect()
    gc.freeze()
    clock = MonotonicClock()
    tracer = tracing.tracer("pdserve-decode", environment, clock)
    asyncio.run(_serve(settings, secret, path, built, clock=clock, tracer=tracer))


async def _serve(
    settings: DecodeSettings, secret: bytes, path: Path, built: BuiltEngine, *, clock: Clock, tracer: Tracer
) -> None:
    identity = worker_identity(
        built, role=pb.WORKER_ROLE_DECODE, incarnation=new_incarnation(), model_name=path.name
    )
    service = DecodeService(
        built,
        identity,
        secret=secret,
        lease_s=settings.lease_s,
        directory=RequestDirectory(max_num_requests=settings.max_num_requests, role="decode", tracer=tracer),
        event_loop=asyncio.get_running_loop(),
        on_broken=program.end_broken,
        clock=clock,
    )
    server = program.new_server()
    port = program.bind(server, settings.host, settings.port)
    ways_in = _ways_in(settings, server, port, service, clock)
    service.offer([way.endpoint for way in ways_in])
    service.engine_loop.start()
    try:
        with shown(service.metrics, settings.host, settings.metrics_port):
            await program.serve(
                server,
                service,
                SessionServer(service, secret=secret, lease_s=settings.lease_s),
                drain_limit_s=settings.drain_limit_s,
                on_serving=partial(
                    program.announce, f"{settings.reachable_host}:{port}", settings.announce_fd
                ),
            )
    finally:
        for way in ways_in:
            way.close()
        service.engine_loop.stop(limit_s=program.ENGINE_STOP_LIMIT_S)


@dataclass(frozen=True, slots=True)
class _WayIn:
    endpoint: pb.Endpoint
    close: Callable[[], None]


def _ways_in(
    settings: DecodeSettings, server: grpc.aio.Server, port: int, service: DecodeService, clock: Clock
) -> list[_WayIn]:
    """Listens for KV on every transport that is set, in order of preference.

    What needs a GPU, and is not there, is left out. Raises ``ConfigError`` when nothing remains.
    """

    @cache
    def listener() -> tcp.TcpListener:
        listener = tcp.TcpListener(
            service.landing,
            host=settings.host,
            port=settings.data_port,
            clock=clock,
            payload_openers=service.gpu_ways.receivers,
        )
        listener.start()
        return listener

    def shared_memory() -> _WayIn:
        listener = shm.SharedMemoryListener(service.landing, clock=clock)
        listener.start()
        return _WayIn(pb.Endpoint(transport=shm.NAME, address=listener.address), listener.close)

    def sockets(transport: str) -> _WayIn:
        address = f"{settings.reachable_host}:{listener().port}"
        return _WayIn(pb.Endpoint(transport=transport, address=address), listener().close)

    def control_port() -> _WayIn:
        server.add_generic_rpc_handlers((grpc_link.handler(service.landing, clock),))
        address = f"{settings.reachable_host}:{port}"
        return _WayIn(pb.Endpoint(transport=grpc_link.NAME, address=address), lambda: None)

    open_way = {shm.NAME: shared_memory, grpc_link.NAME: control_port}
    for name in (tcp.NAME, *service.gpu_ways.receivers):
        open_way[name] = partial(sockets, name)
    ways_in = [open_way[name]() for name in settings.transports if name in open_way]
    if not ways_in:
        raise ConfigError(f"none of these transports can be had here: {', '.join(settings.transports)}")
    return ways_in
