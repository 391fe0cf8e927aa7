"""A worker's state as the message that routers, probes and tests read."""

from __future__ import annotations

import time

from pdserve.engine.build import BuiltEngine
from pdserve.engine.loop import EngineLoop
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.version import VERSION
from pdserve.worker.identity import boot_id


def worker_identity(
    built: BuiltEngine, *, role: pb.WorkerRole, incarnation: int, model_name: str
) -> pb.WorkerIdentity:
    return pb.WorkerIdentity(
        role=role,
        incarnation=incarnation,
        model_name=model_name,
        model_fingerprint=built.loaded.fingerprint,
        max_context_tokens=built.max_context_tokens,
        block_size=built.storage.layout.block_size,
        num_blocks=built.num_blocks,
        version=VERSION,
        boot_id=boot_id(),
    )


def worker_status(
    identity: pb.WorkerIdentity,
    engine_loop: EngineLoop,
    *,
    num_reserved: int,
    num_quarantined_blocks: int,
    is_draining: bool,
    counters: dict[str, float],
) -> pb.WorkerStatus:
    stats = engine_loop.stats
    return pb.WorkerStatus(
        identity=identity,
        num_waiting=stats.num_waiting,
        num_running=stats.num_running,
        num_reserved=num_reserved,
        num_free_blocks=stats.num_free_blocks,
        num_owned_blocks=stats.num_owned_blocks,
        num_cached_blocks=stats.num_cached_blocks,
        num_quarantined_blocks=num_quarantined_blocks,
        draining=is_draining,
        num_waiting_prefill_tokens=stats.num_waiting_prefill_tokens,
        last_step_age_s=engine_loop.last_tick_age_s,
        counters={
            "steps": stats.num_steps,
            "preemptions": stats.num_preemptions,
            "computed_tokens": stats.num_computed_tokens,
            "cached_tokens": stats.num_cached_tokens,
            "generated_tokens": stats.num_generated_tokens,
            **counters,
        },
        wall_clock_unix_s=time.time(),
    )
