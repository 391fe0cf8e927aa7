"""What operators' tools are told about the workers, as plain data for JSON. Pure."""

from __future__ import annotations

from typing import Any

from pdserve.rpc.status import blocks_by_state, sequences_by_state
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve_router.worker_client import WorkerClient
from pdserve_router.workers import Workers


def describe(workers: Workers) -> dict[str, Any]:
    """``unresolved``: configured names that stand for no address now."""
    return {
        "workers": [_worker(client) for client in (*workers.prefill, *workers.decode)],
        "unresolved": [*workers.prefill.nameless, *workers.decode.nameless],
    }


def picture(workers: Workers) -> dict[str, Any]:
    """As ``describe``, with counts by state for each worker that is up, as ``/metrics`` has them."""
    clients = (*workers.prefill, *workers.decode)
    return describe(workers) | {"workers": [_worker(client) | _counts(client) for client in clients]}


def _counts(client: WorkerClient) -> dict[str, dict[str, int]]:
    status = client.status
    if status is None:
        return {}
    return {"sequences": sequences_by_state(status), "blocks": blocks_by_state(status)}


def _worker(client: WorkerClient) -> dict[str, str]:
    return {
        "address": client.address,
        "role": "prefill" if client.role == pb.WORKER_ROLE_PREFILL else "decode",
        "state": _state(client),
        "problem": "" if client.status is not None else client.problem,
    }


def _state(client: WorkerClient) -> str:
    status = client.status
    if status is None:
        return "down"
    if status.draining:
        return "draining"
    return "ready" if client.is_ready else "stuck"
