"""Runs the prefill worker: everything that needs torch. ``main`` reads the settings first."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from pdserve import tracing
from pdserve.clock import Clock, MonotonicClock
from pdserve.config import secret_bytes
from pdserve.engine.build import BuiltEngine, build_engine
from pdserve.model.embedded import resolve_model
from pdserve.rpc.session import SessionServer
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.tracing import Tracer
from pdserve.transfer import grpc_link, shm, tcp
from pdserve.transfer.outbox import Ways
from pdserve.worker import program
from pdserve.worker.directory import RequestDirectory
from pdserve.worker.identity import new_incarnation
from pdserve.worker.metrics import shown
from pdserve.worker.status import worker_identity
from pdserve_prefill.config import PrefillSettings
from pdserve_prefill.service import PrefillService


def run(settings: PrefillSettings, environment: Mapping[str, str]) -> None:
    """Loads the model and serves until a signal. Raises ``ConfigError`` or ``UnsupportedModel``."""
    secret = secret_bytes(settings.secret, settings.host)
    path = resolve_model(settings.model)
    config = settings.engine_config(prefill_chunk_tokens=settings.max_num_batched_tokens)
    built = build_engine(path, replace(config, shares_kv=True))
    # What is loaded stays: no collection needs to look at it again.
    gc.collect()
    gc.freeze()
    clock = MonotonicClock()
    tracer = tracing.tracer("pdserve-prefill", environment, clock)
    asyncio.run(_serve(settings, secret, path, built, clock=clock, tracer=tracer))


async def _serve(
    settings: PrefillSettings, secret: bytes, path: Path, built: BuiltEngine, *, clock: Clock, tracer: Tracer
) -> None:
    identity = worker_identity(
        built, role=pb.WORKER_ROLE_PREFILL, incarnation=new_incarnation(), model_name=path.name
    )
    shared_memory = shm.SharedMemoryWay(built.storage, clock)
    service = PrefillService(
        built,
        identity,
        ways=Ways(
            {shm.NAME: shared_memory.connect, tcp.NAME: tcp.connect, grpc_link.NAME: grpc_link.connect},
            shared_memory.senders,
        ),
        directory=RequestDirectory(max_num_requests=settings.max_num_requests, role="prefill", tracer=tracer),
        event_loop=asyncio.get_running_loop(),
        on_broken=program.end_broken,
        clock=clock,
        wire_option=settings.wire_dtype,
    )
    server = program.new_server()
    port = program.bind(server, settings.host, settings.port)
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
        service.outbox.close()
        service.engine_loop.stop(limit_s=program.ENGINE_STOP_LIMIT_S)
